"""What a pipeline's step should take of a device's memory besides its state: by its table, term by term."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import step as steps
from jaxpar.pipeline.executor.engine import PipelineEngine
from jaxpar.pipeline.executor.packing import Packed
from jaxpar.pipeline.executor.programs import StageInputs
from jaxpar.state import State
from jaxpar.strategies.pipeline import IN_PLACE
from scripts.bench.pipeline_case import FAST, Case, Parts, nbytes, temporary_bytes

Stashes = dict[tuple[int, int], Packed]


def scalar(dtype: Any) -> Any:
    """Abstract."""
    return jax.ShapeDtypeStruct((), dtype)


def terms(parts: Parts) -> dict[str, int]:
    """Bytes by what they are for."""
    engine = parts.engine()
    slots = dict(parts.lowered.shape.num_slots)
    numbers, ranks, kinds = len(engine.programs), engine.shape.num_ranks, len(parts.stages.examples)
    return {
        "stashes": sum(slots[stash] * packing.nbytes for stash, packing in engine.stashes.items()),
        "inboxes": sum(number * engine.wire.nbytes for buffer, number in slots.items() if isinstance(buffer, str)),
        "outputs": 2 * engine.wire.nbytes,
        "rows": nbytes(parts.case.rows),
        "dearest action": max(_action(parts, engine, n, rank) for n in range(numbers) for rank in range(ranks)),
        "gradients": parts.details.state.params.packing.nbytes,
        "update": max(_update(parts, kind) for kind in range(kinds)),
    }


def total(terms: dict[str, int]) -> int:
    """At the fullest moment: in a clock, or, when the stashes have gone, in the update."""
    of_clocks = sum(terms.values()) - terms["gradients"] - terms["update"]
    return terms["gradients"] + max(of_clocks, terms["update"])


def single_microbatch(case: Case) -> int:
    """Temporary bytes of one device's gradients of one microbatch; a gradient is output, not temporary."""
    problem = case.problem

    def gradients(params: Any, rows: Any) -> Any:
        state = State(jnp.zeros((), jnp.int32), jax.random.key_data(jax.random.key(0)), params, ())
        return steps.gradients(problem, state, rows, rows["weights"].sum())

    return _temporary(gradients, problem.model.shapes, steps.abstract(case.rows))


def _temporary(function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = ()) -> int:
    jitted = jax.jit(function, donate_argnums=donated, compiler_options=IN_PLACE | FAST)
    return temporary_bytes(jitted.lower(*arguments).compile())


def _action(parts: Parts, engine: PipelineEngine, number: int, rank: int) -> int:
    """Of an action by itself, which reads and writes stashes of two slots and adds to the gradients."""
    num_chunks, stages, program = parts.table.num_chunks, parts.stages, engine.programs[number]
    kind, chunk = divmod(number, num_chunks)
    tree = engine.packing.tree(kind)
    numbered = jax.tree.unflatten(jax.tree.structure(tree), range(len(jax.tree.leaves(tree))))
    which = jax.tree.leaves(stages.part(numbered, stages.examples[kind], chunk))
    rows: Any = steps.abstract(_microbatches(parts), 1)
    params = stages.part(tree, stages.examples[kind], chunk)
    key = jax.eval_shape(jax.random.key, 0)
    given = StageInputs(params, rows, key, scalar(jnp.int32), scalar(jnp.float32))
    x = [] if program.stage == 0 else [stages.model.inputs(rows)[stages.bounds[program.stage]]]
    dy = [] if program.output is None else [program.output]

    def act(stashes: Stashes, grads: Packed, inputs: list[Any], slot: jax.Array) -> Any:
        read = {stash: engine.stashes[stash].read(number, slots, slot) for stash, slots in stashes.items()}
        saved = {stash: values for stash, values in read.items() if stash[0] < rank <= stash[1]}
        outputs, made = program.cut.run[rank](inputs, saved)
        for stash, values in made.items():
            stashes = stashes | {stash: engine.stashes[stash].write(number, stashes[stash], slot, values)}
        if 0 < rank == engine.shape.num_ranks - 1:
            outputs, gradients = outputs[: len(outputs) - len(which)], outputs[len(outputs) - len(which) :]
            grads = engine.packing.add(kind, grads, gradients, which)
        return outputs, stashes, grads

    stashes = {stash: jax.eval_shape(partial(packing.zeros, 2)) for stash, packing in engine.stashes.items()}
    grads = jax.eval_shape(engine.packing.zeros)
    inputs = [*jax.tree.leaves(given), *x, *dy]
    return _temporary(act, stashes, grads, inputs, scalar(jnp.int32), donated=(0, 1))


def _update(parts: Parts, kind: int) -> int:
    """Of the optimizer's update of what a device holds."""
    problem = parts.case.problem
    params = parts.details.state.params.packing.tree(kind)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    state = State(scalar(jnp.int32), key, params, jax.eval_shape(problem.optimizer.init, params))
    sums = steps.abstract(problem.task.zeros())
    return _temporary(partial(steps.update, problem), state, params, sums, scalar(jnp.float32), donated=(0,))


def _microbatches(parts: Parts) -> dict[str, Any]:
    m = parts.table.num_microbatches
    return jax.eval_shape(partial(steps.microbatches, num=m), dict(parts.case.problem.batch))
