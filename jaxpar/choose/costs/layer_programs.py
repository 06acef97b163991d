"""The programs of the layers of a model, each as a pipeline stage of its own, and their times on a device."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.core.state import nbytes
from jaxpar.core.step import Problem, abstract
from jaxpar.measure.phases import seconds_in_turn
from jaxpar.strategies.pipeline.executor.stage_programs import StageInputs, StageProgram, StagePrograms, trace_stage
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.tables.table import loop_stages

FORWARD, BACKWARD = range(2)  # phases of the programs


class LayerPrograms:
    """The forward and backward programs of every layer for one microbatch. Equal layers share theirs."""

    def __init__(self, problem: Problem, microbatch: Mapping[str, Any], *, remat: str, num_phases: int = 2):
        """Trace the programs. microbatch: its arrays or their shapes.

        num_phases: 2 for F and BW; 3 for F, B and W, which can be sized but not measured.
        """
        self._model = problem.model
        inputs = problem.model.inputs(abstract(microbatch))
        has_gradient = [[jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x)] for x in inputs[1:]]
        self._can_cut = [*map(all, has_gradient), True]  # after each layer
        stages, key = _stages(problem, inputs), jax.eval_shape(lambda: jax.random.key(0))
        # the programs; stage i is layer i
        self.programs = StagePrograms(stages, abstract(dict(microbatch)), key, num_phases=num_phases, remat=remat)
        self.numbers = self.programs.numbers[:, 0].tolist()  # number of the program of each layer

    def measure(self, microbatch: Mapping[str, np.ndarray], *, repeats: int) -> list[LayerProfile]:
        """Return the profile measured on the default device: medians of `repeats` calls of each program."""
        seconds = seconds_in_turn(self.calls(microbatch), repeats)
        return self.with_times({one: (seconds[one, FORWARD], seconds[one, BACKWARD]) for one in self.numbers})

    def calls(self, microbatch: Mapping[str, np.ndarray]) -> dict[tuple[int, int], Callable[[], Any]]:
        """Return a function that runs a program on the default device, by number of the program and phase."""
        run = jax.jit(self.programs.run, static_argnums=(0, 1))
        calls: dict[tuple[int, int], Callable[[], Any]] = {}
        arrays, key, x = jax.device_put(dict(microbatch)), jax.random.key(0), None
        for layer, number in enumerate(self.numbers):
            inputs = StageInputs(self._init(layer), arrays, key, jnp.int32(0), jnp.float32(1), x)
            outputs, saved = run(number, FORWARD, inputs, {})
            backward = inputs._replace(dy=outputs.y)
            calls.setdefault((number, FORWARD), partial(run, number, FORWARD, inputs, {}))
            calls.setdefault((number, BACKWARD), partial(run, number, BACKWARD, backward, saved))
            x = outputs.y
        return calls

    def on_devices(self, microbatch: Mapping[str, Any], devices: Sequence[jax.Device]) -> list[Callable[[], Any]]:
        """Return a function for each device that runs the backward pass of the layer in the middle of the model."""
        run, number = jax.jit(self.programs.run, static_argnums=(0, 1)), self.numbers[len(self.numbers) // 2]
        layer, program = self.numbers.index(number), self.programs.programs[number]
        x, dy = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), (program.inputs.x, program.y))
        arrays = jax.device_put(dict(microbatch))
        inputs = StageInputs(self._init(layer), arrays, jax.random.key(0), jnp.int32(0), jnp.float32(1), x, dy)
        calls: list[Callable[[], Any]] = []
        for device in devices:
            there = jax.device_put(inputs, device)
            _, saved = run(number, FORWARD, there._replace(dy=None), {})
            calls.append(partial(run, number, BACKWARD, there, saved))
        return calls

    def _init(self, layer: int) -> Any:
        """Return initial parameters of a layer, with the arrays that are tied to it."""
        stages = self.programs.stages
        device = stages.examples[stages.kinds[layer]]
        held = stages.init(jax.random.key(0), stages.kinds[layer], jnp.zeros(1, jnp.int32))
        return stages.part(held, device, 0)

    def with_times(self, times: Mapping[int, tuple[float, float]]) -> list[LayerProfile]:
        """Return the profile with the seconds of the forward and backward pass of each program."""
        profile = []
        for layer, number, can_cut in zip(self._model.layers, self.numbers, self._can_cut, strict=True):
            program = self.programs.programs[number]
            sizes = nbytes(program.y), kept_bytes(program, FORWARD, BACKWARD), nbytes(layer.shapes)
            profile.append(LayerProfile(layer.name, *times[number], *sizes, can_cut))
        return profile


def loss_program(
    problem: Problem, inputs: Sequence[Any], microbatch: Mapping[str, Any], *, remat: str, num_phases: int
) -> StageProgram:
    """Trace the program of the last layer alone, with the loss. inputs: shapes of the inputs of all layers."""
    stages, last = _stages(problem, inputs), len(problem.model.layers) - 1
    params = stages.part(stages.select(problem.model.shapes, last), last, 0)
    key, scalar = jax.eval_shape(lambda: jax.random.key(0)), partial(jax.ShapeDtypeStruct, ())
    given = StageInputs(params, dict(microbatch), key, scalar(jnp.int32), scalar(jnp.float32), inputs[last])
    return trace_stage(stages, last, given, num_phases=num_phases, remat=remat)


def kept_bytes(program: StageProgram, made: int, read: int) -> int:
    """Return the bytes that phase `made` of a program saves until phase `read`."""
    return nbytes(program.cut.saved.get((made, read), []))


def stash_spans(num_phases: int) -> list[tuple[int, int]]:
    """Return the phase that writes each stash and the last one that reads it: F to B, or also F to W and B to W."""
    return list(itertools.combinations(range(num_phases), 2))


def kept_by_dtype(program: StageProgram, num_phases: int) -> tuple[dict[str, float], ...]:
    """Return the bytes that a program saves in each stash, by dtype."""
    found = tuple(dict[str, float]() for _ in stash_spans(num_phases))
    for by_dtype, span in zip(found, stash_spans(num_phases), strict=True):
        for x in program.cut.saved.get(span, []):
            by_dtype[str(x.dtype)] = by_dtype.get(str(x.dtype), 0.0) + nbytes([x])
    return found


def _stages(problem: Problem, inputs: Sequence[Any]) -> Stages:
    number = len(problem.model.layers)  # of stages, of one layer each
    return Stages(problem.model, range(number + 1), loop_stages(number, 1), inputs, problem.task)
