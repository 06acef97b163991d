"""Predicts the memory of a pipeline step, without its state, from the table, term by term."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.core import step as steps
from jaxpar.core.state import State
from jaxpar.strategies.pipeline.executor.engine import PipelineEngine
from jaxpar.strategies.pipeline.executor.packing import Packed
from jaxpar.strategies.pipeline.executor.stage_programs import StageInputs
from jaxpar.strategies.pipeline.lockstep import STASH_IN_PLACE
from scripts.bench.pipeline_case import FAST, Case, Parts, nbytes, temporary_bytes

Stashes = dict[tuple[int, int], Packed]


def scalar(dtype: Any) -> Any:
    """Return an abstract scalar."""
    return jax.ShapeDtypeStruct((), dtype)


def terms(parts: Parts) -> dict[str, int]:
    """Return the bytes of each term."""
    engine = parts.engine()
    slots = dict(parts.lowered.shape.num_slots)
    numbers, phases, kinds = len(engine.programs.programs), engine.shape.num_phases, len(parts.stages.examples)
    inboxes = sum(number for buffer, number in slots.items() if isinstance(buffer, str))
    return {
        "stashes": engine.activation_bytes["stashes"],
        "inboxes": inboxes * engine.transfers.nbytes,
        "outputs": 2 * engine.transfers.nbytes,
        "batch": nbytes(parts.case.batch),
        "most expensive action": max(
            _action(engine, number, phase) for number in range(numbers) for phase in range(phases)
        ),
        "gradients": parts.details.staged.params.packing.nbytes,
        "update": max(_update(parts, kind) for kind in range(kinds)),
    }


def total(terms: dict[str, int]) -> int:
    """Return the peak: in the most expensive clock, or in the update, when the stashes are free again."""
    of_clocks = sum(terms.values()) - terms["gradients"] - terms["update"]
    return terms["gradients"] + max(of_clocks, terms["update"])


def single_microbatch(case: Case) -> int:
    """Return the temporary bytes of computing the gradients of one microbatch on one device.

    The gradients themselves are outputs and do not count.
    """
    problem = case.problem

    def gradients(params: Any, batch: Any) -> Any:
        state = State(jnp.zeros((), jnp.int32), jax.random.key_data(jax.random.key(0)), params, ())
        return steps.gradients(problem, state, batch, batch["weights"].sum())

    return _temporary(gradients, problem.model.shapes, steps.abstract(case.batch))


def _temporary(function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = ()) -> int:
    jitted = jax.jit(function, donate_argnums=donated, compiler_options=STASH_IN_PLACE | FAST)
    return temporary_bytes(jitted.lower(*arguments).compile())


def _action(engine: PipelineEngine, number: int, phase: int) -> int:
    """Return the temporary bytes of one action, which reads and writes stashes of two slots and adds to gradients."""
    programs = engine.programs

    def act(stashes: Stashes, grads: Packed, inputs: StageInputs, slot: jax.Array) -> Any:
        read = {stash: engine.stashes[stash].read(number, slots, slot) for stash, slots in stashes.items()}
        saved = {stash: values for stash, values in read.items() if stash[0] < phase <= stash[1]}
        outputs, made = programs.run(number, phase, inputs, saved)
        for stash, values in made.items():
            stashes = stashes | {stash: engine.stashes[stash].write(number, stashes[stash], slot, values)}
        if outputs.dparams is not None:
            grads = engine.add_gradients(number, grads, outputs.dparams)
        return outputs._replace(dparams=None), stashes, grads

    stashes = {stash: jax.eval_shape(partial(packing.zeros, 2)) for stash, packing in engine.stashes.items()}
    grads, inputs = jax.eval_shape(engine.packing.zeros), programs.programs[number].inputs
    return _temporary(act, stashes, grads, inputs, scalar(jnp.int32), donated=(0, 1))


def _update(parts: Parts, kind: int) -> int:
    """Return the temporary bytes of the optimizer update of the parameters on a device."""
    problem = parts.case.problem
    params = parts.details.staged.params.packing.tree(kind)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    state = State(scalar(jnp.int32), key, params, jax.eval_shape(problem.optimizer.init, params))
    sums = steps.abstract(problem.task.zeros())
    return _temporary(partial(steps.update, problem), state, params, sums, scalar(jnp.float32), donated=(0,))
