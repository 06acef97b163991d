"""The programs of F, B and W of each stage, over explicit weights, stashed values and transfers.

A stage's layers are traced once, forward and backward, and cut into phases. A phase is a pure function; it knows
nothing of meshes, axis names or schedules. The engine (engine.py) runs phases as branches of one program for all
devices; any other caller can run them one by one.
"""

from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.model import REMAT_POLICIES, Activations, Batch, Model, Params
from jaxpar.pipeline.executor.split_backward import Cut, Origin, Saved, cut_phases, flatten
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.step import example_keys
from jaxpar.tasks import Sums, Task, mean_loss

REMATS = ("full", "none", "dots")


# By model: stages that have been traced.
_TRACED: WeakKeyDictionary[Model, dict[Any, "StageProgram"]] = WeakKeyDictionary()


class StageInputs(NamedTuple):
    """The inputs of a phase of a stage, besides what earlier phases of the same microbatch saved for it.

    Attributes:
      params: of the stage's layers, and what is tied to them.
      microbatch: its examples.
      key: of the step's dropout; None when evaluating.
      shift: layer-index offset from the stage that the program was traced for, for dropout.
      weight: of the global batch, by which losses are divided.
      x: for F: the stage's input; None at stage 0, whose input is in the microbatch.
      dy: for B: the gradient of the stage's output; None at the last stage, whose output is the loss.
    """

    params: Any
    microbatch: Batch
    key: Any
    shift: Any
    weight: Any
    x: Activations | None = None
    dy: Activations | None = None


class StageOutputs(NamedTuple):
    """The outputs of a phase; None in the place of what it does not make.

    Attributes:
      y: by F: the stage's output; the last stage has `sums` instead.
      sums: by F of the last stage: the microbatch's sums.
      dx: by B: the gradient of the stage's input. Stage 0 has none to send; where its B and W are apart, `dx` is the
        gradient of its second layer's input, which nobody takes.
      dparams: by W, or by B where it is fused with W: the gradient of StageInputs.params.
    """

    y: Activations | None = None
    sums: Sums | None = None
    dx: Activations | None = None
    dparams: Any = None


class StageProgram(NamedTuple):
    """The phases of one chunk of one kind of device.

    Attributes:
      stage: that it was traced for; others run it with a shift.
      inputs: abstract, with x and dy.
      outputs: by phase, abstract.
      cut: the phases.
    """

    stage: int
    inputs: StageInputs
    outputs: tuple[StageOutputs, ...]
    cut: Cut

    @property
    def y(self) -> Activations | None:
        """The output for the next stage, abstract; None at the last one."""
        return self.outputs[0].y


class StagePrograms:
    """The programs of all stages. Stages that are equal but for their place in the model share one.

    Attributes:
      stages: which layers are where.
      num_phases: 1: F alone; 2: F and a fused backward; 3: F, B and W.
      numbers: the program's number by [device, chunk].
      programs: by number.
    """

    def __init__(self, stages: Stages, microbatch: Batch, key: jax.Array | None, *, num_phases: int, remat: str):
        """Trace the programs.

        Args:
          stages: which layers are where.
          microbatch: a microbatch, abstract.
          key: of dropout, abstract; None: without.
          num_phases: see the attribute.
          remat: full, none, dots: what the backward pass finds saved.
        """
        self.stages, self.num_phases = stages, num_phases
        num_chunks = stages.placement.shape[1]
        self.numbers = np.array(stages.kinds)[:, None] * num_chunks + np.arange(num_chunks)
        by_stage = self.numbers.ravel()[np.argsort(stages.placement, axis=None)].tolist()
        scalar = partial(jax.ShapeDtypeStruct, ())
        traced: dict[int, StageProgram] = {}
        x = None
        for number in by_stage:
            if number not in traced:
                device = stages.examples[self.kind(number)]
                params = self.params(number, stages.select(stages.model.shapes, device))
                inputs = StageInputs(params, microbatch, key, scalar(jnp.int32), scalar(jnp.float32), x)
                stage = int(stages.placement[device, self.chunk(number)])
                traced[number] = trace_stage(stages, stage, inputs, num_phases=num_phases, remat=remat)
            x = traced[number].y
        self.programs = [traced[number] for number in range(len(traced))]
        self._by_stage = by_stage

    def kind(self, number: int) -> int:
        """Return the kind of device that has a program."""
        return number // self.stages.placement.shape[1]

    def chunk(self, number: int) -> int:
        """Return the chunk of its device that runs a program."""
        return number % self.stages.placement.shape[1]

    def sender(self, number: int) -> int | None:
        """Return the program that makes the input of this one; None at stage 0."""
        stage = self.programs[number].stage
        return self._by_stage[stage - 1] if stage else None

    def params(self, number: int, held: Params) -> Params:
        """Return what a program takes of a device's arrays, under the names of the device it was traced for."""
        return self.stages.part(held, self.stages.examples[self.kind(number)], self.chunk(number))

    def run(self, number: int, phase: int, inputs: StageInputs, saved: Saved) -> tuple[StageOutputs, Saved]:
        """Run one phase of a program: a pure function, which can be jitted.

        Args:
          number: of the program.
          phase: 0: F; 1: B, or the fused backward; 2: W.
          inputs: what this phase does not use may be None.
          saved: what earlier phases of the microbatch saved for this one.

        Returns:
          Its outputs, and what it saves for later phases.
        """
        program = self.programs[number]
        leaves: list[Any] = []
        for value, like in zip(inputs, program.inputs, strict=True):
            leaves += [None] * len(jax.tree.leaves(like)) if value is None else jax.tree.leaves(value)
        results, made = program.cut.run[phase](leaves, saved)
        return jax.tree.unflatten(jax.tree.structure(program.outputs[phase]), results), made


def trace_stage(stages: Stages, stage: int, inputs: StageInputs, *, num_phases: int, remat: str) -> StageProgram:
    """Trace the layers of a stage, and cut the trace into phases.

    A planner asks about many pipelines of one model: a stage with layers, inputs and phases as of an earlier one is not
    traced again. What is traced inside `shard_map` is for its mesh.

    Args:
      stages: which layers are where.
      stage: number of the stage.
      inputs: abstract; dy is not looked at.
      num_phases: 1: F alone; 2: F and a fused backward; 3: F, B and W.
      remat: full, none, dots: what the backward pass finds saved.
    """
    computation = _Stage(
        stages.model, stages.task, stages.bounds[stage : stage + 2], stage == 0, stage == stages.num_stages - 1
    )
    leaves, structure = jax.tree.flatten(inputs)
    avals = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    key = (stage, *computation[1:], avals, structure, num_phases, remat, jax.sharding.get_abstract_mesh())
    traced = _TRACED.setdefault(stages.model, {})
    if key not in traced:
        traced[key] = _trace(stage, computation, inputs, num_phases=num_phases, remat=remat)
    return traced[key]


def _trace(stage: int, computation: "_Stage", inputs: StageInputs, *, num_phases: int, remat: str) -> StageProgram:
    y = None
    if not computation.is_last:
        y = jax.eval_shape(lambda inputs: computation.forward(inputs, inputs.params, inputs.x, None)[0], inputs)
    inputs = inputs._replace(dy=y)
    phases = partial(computation.phases, num_phases=num_phases, remat=remat)
    closed, outputs = jax.make_jaxpr(phases, return_shape=True)(inputs)
    num_outputs = [len(jax.tree.leaves(of_phase)) for of_phase in outputs]
    pieces = cut_phases(flatten(closed, remat=num_phases == 3), num_outputs, input_origins(inputs))
    return StageProgram(stage, inputs, tuple(outputs), pieces)


def input_origins(inputs: StageInputs) -> list[Origin]:
    """Return the origin of each leaf. Random numbers are slow to draw again; stage 0 is computed from the inputs."""

    def of(part: Any, source: Origin) -> Any:
        return jax.tree.map(lambda _: source, part)

    microbatch = {name: of(x, "saved" if name == "inputs" else "free") for name, x in inputs.microbatch.items()}
    spread = StageInputs(
        of(inputs.params, "free"),
        microbatch,
        of(inputs.key, "saved"),
        of(inputs.shift, "free"),
        of(inputs.weight, "free"),
        of(inputs.x, 0),
        of(inputs.dy, 1),
    )
    return jax.tree.leaves(spread)


class _Stage(NamedTuple):
    """The computation of a stage."""

    model: Model
    task: Task
    span: tuple[int, ...]  # first layer, and the one after the last
    is_first: bool
    is_last: bool

    def layers(self, inputs: StageInputs, params: Any, x: Activations, start: int, stop: int) -> Activations:
        """Without a scan: it would stack the weights for every microbatch, and make dX and dW at once."""
        keys_B = None if inputs.key is None else example_keys(inputs.key, inputs.microbatch)
        return self.model.apply_layers(
            params, x, inputs.microbatch, keys_B, start, stop, shift=inputs.shift, scan=False
        )

    def forward(self, inputs: StageInputs, params: Any, x: Any, bump: Any) -> tuple[Activations, Sums | None]:
        """What is differentiated, the output or the loss; and the sums of a last stage.

        Args:
          bump: zeros to be added to the output of the first layer, or None.
        """
        start, stop = self.span
        x = inputs.microbatch["inputs"] if self.is_first else x
        if bump is not None:
            x, start = jax.tree.map(_add, self.layers(inputs, params, x, start, start + 1), bump), start + 1
        y = self.layers(inputs, params, x, start, stop)
        if not self.is_last:
            return y, None
        sums = self.task.sums(y, inputs.microbatch)
        return mean_loss(sums.loss, inputs.weight), sums

    def phases(self, inputs: StageInputs, *, num_phases: int, remat: str) -> list[StageOutputs]:
        """The outputs of each phase."""
        forward = partial(self.forward, inputs)
        if num_phases == 1:
            return [self._outputs(*forward(inputs.params, inputs.x, None))]
        bump, (start, stop) = None, self.span
        if num_phases == 3 and self.is_first and stop - start > 1:
            # Nobody waits for dX of stage 0, so all would be W. Its B is what leads to dX of its second layer.
            first = partial(self.layers, inputs, inputs.params, inputs.microbatch["inputs"], start, start + 1)
            bump = jax.tree.map(_zeros_of_float, jax.eval_shape(first))
        function = forward if remat in ("none", "full") else jax.checkpoint(forward, policy=REMAT_POLICIES[remat])
        y, pullback, sums = jax.vjp(function, inputs.params, inputs.x, bump, has_aux=True)
        dy = jnp.ones(y.shape, y.dtype) if self.is_last else inputs.dy
        if remat == "full":  # F by itself: so all that jax.vjp computes is B's, again
            y, sums = forward(inputs.params, inputs.x, None)
        dparams, dx, dbump = pullback(dy)
        dx = dbump if self.is_first else dx
        outputs = self._outputs(y, sums)
        if num_phases == 2:
            return [outputs, StageOutputs(dx=dx, dparams=dparams)]
        return [outputs, StageOutputs(dx=dx), StageOutputs(dparams=dparams)]

    def _outputs(self, y: Activations, sums: Sums | None) -> StageOutputs:
        return StageOutputs(sums=sums) if self.is_last else StageOutputs(y=y)


def _zeros_of_float(x: jax.ShapeDtypeStruct) -> jax.Array | None:
    return jnp.zeros(x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else None


def _add(x: jax.Array, bump: jax.Array | None) -> jax.Array:
    return x if bump is None else x + bump
