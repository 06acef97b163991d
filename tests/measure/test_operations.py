"""Counted operations, against counts by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxpar.measure.operations import (
    ATTENTION_KERNEL,
    PASS,
    PRODUCT,
    SLICE,
    Operation,
    loop_bytes,
    operations,
    residuals,
)
from jaxpar.models.attention import attend, attend_by_cudnn

F32, BF16 = jnp.float32, jnp.bfloat16


def array(*shape: int, dtype: jnp.dtype = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def passes(found: list[Operation]) -> float:
    return sum(one.calls * one.nbytes for one in found if one.kind in (PASS, SLICE))


def products(found: list[Operation]) -> list[Operation]:
    return [one for one in found if one.kind == PRODUCT]


def test_a_reduction_reads_what_its_operand_is_computed_from() -> None:
    """Its bytes are those of narrow sources, or of the operand, if these are fewer; a pass reads the arguments, too."""
    narrow = array(100, dtype=BF16)
    assert passes(operations(lambda x: x.astype(F32).sum(), narrow)) == 200 + 200 + 4
    assert passes(operations(lambda x, y: (x * y).max(), narrow, narrow)) == 400 + 200 + 2
    assert passes(operations(lambda x: (x[:10] * 2).sum(), array(100))) == 400 + 40 + 4


def test_products_and_passes() -> None:
    """Between two products, the first result is read and the operand of the second is written; views are free."""

    def function(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w) * 2
        return y.reshape(5, 2, 3).reshape(10, 3).T.T @ v

    found = operations(function, array(10, 4), array(4, 3), array(3, 7))
    assert products(found) == [
        Operation(PRODUCT, "float32", 2 * 10 * 4 * 3, 4 * (10 * 4 + 4 * 3 + 10 * 3)),
        Operation(PRODUCT, "float32", 2 * 10 * 3 * 7, 4 * (10 * 3 + 3 * 7 + 10 * 7)),
    ]
    assert passes(found) == 2 * 4 * 30


def test_fused_operations_move_inputs_and_outputs_once() -> None:
    found = operations(lambda x, y: (jnp.exp(x) + y * x, x - 1), array(100), array(100))
    assert (len(found), passes(found)) == (1, 4 * 400)


def test_a_reduction_ends_a_pass() -> None:
    """The input of the sum is read by it, and again by what uses the sum; what is between products is not written."""
    found = operations(lambda x: x * x - (x * x).sum(), array(100))
    assert passes(found) == 400 + 400 + 400  # read x; reduce x * x; write the result
    found = operations(lambda x: x - x.sum(), array(100))
    assert passes(found) == 400 + 400 + 400  # the sum reads x, too


def test_products_are_added_in_place() -> None:
    """A loop adds products to a sum that it carries: their kernel reads and writes it, if nothing else reads them."""

    def gradient(x: jax.Array, others: jax.Array, *, is_read: bool) -> jax.Array:
        def add(total: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            product = x @ other
            return total + product, product if is_read else None

        return jax.lax.scan(add, jnp.zeros((5, 7)), others)[0]

    operands = array(5, 3), array(4, 3, 7)
    alone, read = (operations(partial(gradient, is_read=is_read), *operands) for is_read in (False, True))
    [one], [other] = products(alone), products(read)
    assert one.flops == other.flops == 2 * 5 * 3 * 7
    assert one.nbytes - other.nbytes == 4 * 5 * 7
    assert passes(read) - passes(alone) == 4 * 3 * 4 * 5 * 7


def test_loops_and_branches() -> None:
    """A scan counts every trip, a conditional its most expensive branch."""

    def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=6)[0]

    [once] = products(operations(scanned, array(4, 4), array(4, 4)))
    assert (once.calls, once.flops) == (6, 2 * 64)

    def chosen(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)

    assert len(products(operations(chosen, array(4, 4)))) == 1


def test_slices_move_what_they_take() -> None:
    """A lookup does not read the whole table, and its gradient adds to one of zeros."""
    found = operations(lambda table, i: table[i], array(1000, 8), array(3, dtype=jnp.int32))
    assert passes(found) < 400
    assert [one.kind for one in found] == [SLICE, PASS]
    moved = passes(
        operations(lambda t, i: jax.grad(lambda t: t[i].sum())(t), array(1000, 8), array(3, dtype=jnp.int32))
    )
    assert 32_000 <= moved < 2.1 * 32_000


def test_a_loop_carries_neither_constants_nor_slices() -> None:
    """Its sums become results in place: the loop holds the other arrays that are no argument."""
    n, length = 64, 4

    def total(carry: jax.Array, constant: jax.Array, slices: jax.Array) -> jax.Array:
        made = jax.lax.optimization_barrier((2 * carry, 2 * constant, 2 * slices))
        return jax.lax.scan(lambda c, x: (c + made[1] * x, None), made[0], made[2])[0]

    held = loop_bytes(total, array(n), array(n), array(length, n))
    assert held == 4 * n * (1 + length + 1)  # the constant, the slices, and the result, which the carry becomes


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(is_causal: bool) -> None:
    """The backward pass repeats the scores: five products instead of two. A causal kernel skips half of them."""
    B, T, H, K = 2, 16, 4, 8
    x = array(B, T, H, K, dtype=BF16)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, "cudnn", is_causal=is_causal, lengths_B=None).astype(F32).sum()

    found = [one for one in operations(jax.grad(total, (0, 1, 2)), x, x, x) if one.kind == ATTENTION_KERNEL]
    of_product = 2 * B * H * T * T * K * (0.5 if is_causal else 1)
    assert [one.flops for one in found] == [2 * of_product, 5 * of_product]
    assert {one.dtype for one in found} == {"bfloat16"}


def test_masks_of_positions_are_made_once() -> None:
    """The bytes of a mask that depends on positions only are not those of each layer, but it is held, and read."""
    T, x = 64, array(1, 64, 1, 8, dtype=BF16)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array | int) -> jax.Array:
        is_seen_TS = jnp.arange(T)[None, :] <= jnp.arange(T)[:, None] + first
        y = attend_by_cudnn(q, k, v, is_causal=False, lengths_B=None, is_seen_TS=is_seen_TS)
        return y.astype(F32).sum()

    gradient, mask = jax.grad(total, (0, 1, 2)), 2 * T * T
    fixed = operations(lambda *x: gradient(*x, 0), x, x, x)
    shifted = operations(gradient, x, x, x, array(dtype=jnp.int32))
    assert passes(shifted) - passes(fixed) >= mask > passes(fixed)
    of_inputs = x.size * 2
    assert all(one.nbytes >= mask + 4 * of_inputs for one in fixed if one.kind == ATTENTION_KERNEL)
    held = residuals(lambda _w, x, _others: total(x, x, x, 0), (), x, ())
    assert held.saved < mask
    assert loop_bytes(lambda *x: gradient(*x, 0), x, x, x) >= 2 * mask
