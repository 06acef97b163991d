"""The server's program: a nonfinite loss or gradient keeps its update from being applied, and is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.core.loss_scale import LossScale, find_scale, with_scale
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.programs import Arrival, Programs
from tests.strategies.pipelines import Task, make_config, make_problem

MLP = Task("mlp", "classification", layers=1)
SIZE = 3  # gradients per update


@pytest.mark.parametrize("wrong", [None, *((number, part) for number in range(SIZE) for part in ("loss", "gradient"))])
def test_an_update_is_applied_where_all_of_its_gradients_are_finite(wrong: tuple[int, str] | None) -> None:
    problem = make_problem(make_config(MLP), MLP)
    nothing = optax.with_extra_args_support(optax.identity())
    programs = Programs(problem, Mitigations(nothing, nothing, needs_read=False), SIZE)
    params = problem.model.init(jax.random.key(0))
    server = programs.server(params, problem.optimizer.init(params), None, is_grouped=True)
    before = jax.tree.map(np.array, (params, server.optimizer))
    for number in range(SIZE):
        loss, value = (
            (jnp.inf if wrong == (number, "loss") else 1.0),
            (jnp.nan if wrong == (number, "gradient") else 0.1),
        )
        grads = jax.tree.map(lambda x, value=value: jnp.full(x.shape, value, x.dtype), params)
        sums = problem.task.zeros()._replace(loss=jnp.float32(loss))
        at = Arrival(np.float32(0), np.float32(0), np.float32(SIZE), np.int32(5))
        params, server = programs.arrive(number == 0, number == SIZE - 1, params, server, (grads, sums, None, None), at)
        if wrong is None or number >= wrong[0]:  # on arrival, because the step may end before the update is complete
            assert bool(server.totals.finite) == (wrong is None)
    same = [
        np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, ((params, server.optimizer), before)), strict=True)
    ]
    assert all(same) == (wrong is not None)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves((params, server)))  # the next update starts at zero
    assert np.isfinite(programs.metrics(server.totals, None).grad_norm) == (wrong is None)


@pytest.mark.parametrize(("wrong", "after"), [(None, 8.0), (0, 8.0), (1, 4.0)])
def test_the_scale_of_the_gradient_that_is_not_finite_counts(wrong: int | None, after: float) -> None:
    """The first gradient of the update was computed before the scale fell from 16 to 8."""
    problem = make_problem(make_config(MLP, "--config.model.dtype=float16"), MLP)
    nothing = optax.with_extra_args_support(optax.identity())
    programs = Programs(problem, Mitigations(nothing, nothing, needs_read=False), SIZE)
    params = problem.model.init(jax.random.key(0))
    optimizer = with_scale(problem.optimizer.init(params), LossScale(jnp.float32(8), jnp.int32(1)))
    server = programs.server(params, optimizer, None, is_grouped=True)
    for number, scale in enumerate((16.0, 8.0, 8.0)):
        value = jnp.nan if number == wrong else 0.1
        sent = (jax.tree.map(lambda x, value=value: jnp.full(x.shape, value, x.dtype), params), problem.task.zeros())
        at = Arrival(np.float32(0), np.float32(0), np.float32(SIZE), np.int32(5))
        is_first, is_last = number == 0, number == SIZE - 1
        params, server = programs.arrive(is_first, is_last, params, server, (*sent, jnp.float32(scale), None), at)
    scaling = find_scale(server.optimizer)
    assert scaling is not None
    assert (float(scaling.scale), int(scaling.updates)) == (after, 2 if wrong is None else 0)
    assert server.totals.failed_scale == (np.inf if wrong is None else (16.0, 8.0, 8.0)[wrong])
