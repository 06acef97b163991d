"""The F, B and W programs of every stage, as pure functions of weights, saved values and transfers.

The layers of a stage are traced once, forward and backward, and the trace is cut into phases. A phase depends on no
mesh, axis name or schedule. The engine (engine.py) runs the phases as branches of one program for all devices. Other
callers can run them one at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core.loss_scale import unscaled
from jaxpar.core.step import example_keys
from jaxpar.models.model import Activations, Batch, Model, Params
from jaxpar.models.remat import REMAT_POLICIES
from jaxpar.strategies.pipeline.executor.split_backward import Cut, Origin, Saved, cut_phases, flatten
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.tasks import Sums, Task, mean_loss

REMATS = ("full", "none", "dots")
NO_MESH = jax.sharding.AbstractMesh((), ())
# Stages that have been traced, and their programs, by model.
_TRACED: WeakKeyDictionary[Model, dict[Any, Any]] = WeakKeyDictionary()


class StageInputs(NamedTuple):
    """The inputs of one phase of a stage, besides the values that earlier phases of the same microbatch saved."""

    params: Any  # parameters of the stage's layers, and arrays tied to them
    microbatch: Batch  # the examples
    key: Any  # dropout key of the step; None when evaluating
    shift: Any  # layer-index offset from the stage that the program was traced for; dropout keys depend on it
    weight: Any  # divisor of the loss
    x: Activations | None = None  # input of the stage, for F; None at stage 0, whose input is in the microbatch
    # gradient of the stage's output, for B; None at the last stage, whose output is the loss
    dy: Activations | None = None
    # what the loss, and so every dx and dy, is multiplied by; None: nothing. The gradients of parameters are divided by
    # it
    scale: Any = None


class StageOutputs(NamedTuple):
    """The outputs of one phase. Outputs that a phase does not compute are None."""

    y: Activations | None = None  # output of the stage, from F; the last stage returns `sums` instead
    sums: Sums | None = None  # metric sums of the microbatch, from F of the last stage; from B if B includes this F
    # gradient of the stage's input, from B. Stage 0 has no sender to return it to. If its B and W are separate, `dx` is
    # the gradient of the input of its second layer, which is discarded.
    dx: Activations | None = None
    dparams: Any = None  # gradient of StageInputs.params, from W, or from B if B and W are fused


class StageProgram(NamedTuple):
    """The phases of one chunk of one kind of device."""

    stage: int  # the stage that it was traced for; other stages run it with a shift
    inputs: StageInputs  # shapes of the inputs, with x and dy
    outputs: tuple[StageOutputs, ...]  # shapes of the outputs, by phase
    cut: Cut  # the phases

    @property
    def y(self) -> Activations | None:
        """Shapes of the output for the next stage; None at the last stage."""
        return self.outputs[0].y


class StagePrograms:
    """The programs of all stages. Stages that differ only in their position in the model share a program."""

    def __init__(
        self,
        stages: Stages,
        microbatch: Batch,
        key: jax.Array | None,
        scale: jax.ShapeDtypeStruct | None = None,
        *,
        num_phases: int,
        remat: str,
        has_flush: bool = True,
    ):
        """Trace the programs.

        Args:
          stages: the stages.
          microbatch: shapes of a microbatch.
          key: shape of a dropout key; None disables dropout.
          scale: shape of the scale of the loss; None if it is not scaled.
          num_phases: 1: F alone; 2: F and a fused backward; 3: F, B and W.
          remat: none, full or dots: which values the forward pass saves for the backward pass.
          has_flush: see `last_joins_f`.
        """
        self.stages, self.num_phases = stages, num_phases
        self.numbers = stages.program_numbers  # number of the program that each [device, chunk] runs
        _, firsts = np.unique(stages.placement, return_index=True)
        self._by_stage: list[int] = self.numbers.ravel()[firsts].tolist()
        scalar = partial(jax.ShapeDtypeStruct, ())
        traced: dict[int, StageProgram] = {}
        x = None
        for number in self._by_stage:
            if number not in traced:
                device = stages.examples[self.kind(number)]
                params = self.params(number, stages.select(stages.computed.shapes, device))
                inputs = StageInputs(params, microbatch, key, scalar(jnp.int32), scalar(jnp.float32), x, scale=scale)
                stage = int(stages.placement[device, self.chunk(number)])
                how: dict[str, Any] = {"num_phases": num_phases, "remat": remat, "has_flush": has_flush}
                traced[number] = trace_stage(stages, stage, inputs, **how)
            x = traced[number].y
        self.programs = [traced[number] for number in range(len(traced))]  # by number

    @property
    def sums(self) -> tuple[int, Sums]:
        """The phase of the last stage that returns the metric sums of a microbatch, and their shapes."""
        outputs = self.programs[self._by_stage[-1]].outputs
        return next((phase, sums) for phase, of in enumerate(outputs) if (sums := of.sums) is not None)

    def kind(self, number: int) -> int:
        """Return the kind of device that runs a program."""
        return number // self.stages.placement.shape[1]

    def chunk(self, number: int) -> int:
        """Return the chunk whose stage a program computes."""
        return number % self.stages.placement.shape[1]

    def sender(self, number: int) -> int | None:
        """Return the number of the program that computes the input of this one; None at stage 0."""
        stage = self.programs[number].stage
        return self._by_stage[stage - 1] if stage else None

    def sent(self, number: int, phase: int) -> Activations | None:
        """Return the shapes of what a phase of a program sends: its y, or the gradient of the y that it received."""
        return self.programs[number].y if phase == 0 else self.received(number, 0)

    def received(self, number: int, phase: int) -> Activations | None:
        """Return the shapes of what a phase of a program receives; None if it receives nothing."""
        if phase == 0:
            sender = self.sender(number)
            return None if sender is None else self.programs[sender].y
        return self.programs[number].y if phase == 1 else None

    def params(self, number: int, held: Params) -> Params:
        """Return the subset of a device's parameters that a program uses, named as on the representative device."""
        return self.stages.part(held, self.stages.examples[self.kind(number)], self.chunk(number))

    def reads(self, number: int, phase: int) -> dict[str, dict[int, jax.ShapeDtypeStruct]]:
        """Return, by layer, the parameters that a phase of a program reads, in the dtype to which it casts them.

        They are keyed by their number among the arrays of the layer.
        """
        program, first = self.programs[number], 0
        read, by_layer = program.cut.reads[phase], dict[str, dict[int, jax.ShapeDtypeStruct]]()
        for layer, arrays in sorted(program.inputs.params.items()):
            leaves = dict(enumerate(jax.tree.leaves(arrays)))
            used = {i: jax.ShapeDtypeStruct(x.shape, read[first + i]) for i, x in leaves.items() if first + i in read}
            by_layer |= {layer: used} if used else {}
            first += len(leaves)
        return by_layer

    def narrowed(self, number: int) -> dict[str, dict[int, jax.ShapeDtypeStruct]]:
        """Return the parameters that all phases of a program read in the same narrower dtype, as `reads` does."""
        narrow = dict[str, dict[int, jax.ShapeDtypeStruct]]()
        phases = [self.reads(number, phase) for phase in range(self.num_phases)]
        for layer, arrays in self.programs[number].inputs.params.items():
            of_phases = [reads.get(layer, {}) for reads in phases]
            for i, x in enumerate(jax.tree.leaves(arrays)):
                read = {of_phase[i].dtype for of_phase in of_phases if i in of_phase}
                if len(read) == 1 and read != {x.dtype}:
                    narrow.setdefault(layer, {})[i] = jax.ShapeDtypeStruct(x.shape, read.pop())
        return narrow

    def run(self, number: int, phase: int, inputs: StageInputs, saved: Saved) -> tuple[StageOutputs, Saved]:
        """Run one phase of a program, a pure function: return the outputs, and the values saved for later phases.

        Args:
          number: number of the program.
          phase: 0: F; 1: B, or the fused backward; 2: W.
          inputs: the inputs; those that this phase does not use may be None.
          saved: values that earlier phases of the microbatch saved for this phase.
        """
        program = self.programs[number]
        leaves: list[Any] = []
        for value, like in zip(inputs, program.inputs, strict=True):
            leaves += [None] * len(jax.tree.leaves(like)) if value is None else jax.tree.leaves(value)
        results, made = program.cut.run[phase](leaves, saved)
        return jax.tree.unflatten(jax.tree.structure(program.outputs[phase]), results), made


def last_joins_f(remat: str, *, has_flush: bool) -> bool:
    """Return whether B of the last stage includes its F, which then computes nothing.

    With remat full, nothing but the metrics is read from this F. has_flush: whether F and B of a microbatch belong to
    the same step, so that metrics from B count in it.
    """
    return remat == "full" and has_flush


def trace_stage(
    stages: Stages, stage: int, inputs: StageInputs, *, num_phases: int, remat: str, has_flush: bool = True
) -> StageProgram:
    """Trace the layers of a stage, and cut the trace into phases. inputs: shapes; dy is ignored.

    Traces are cached: a stage with the same layers and inputs has one, as do all plans of a model and the
    programs built from them. They are made without a mesh, so that those outside and inside `shard_map` are the same.
    """
    computation = _Stage(
        stages.computed,
        stages.task,
        stages.bounds[stage : stage + 2],
        is_first=stage == 0,
        is_last=stage == stages.num_stages - 1,
        is_evaluation=num_phases == 1,
    )
    leaves, structure = jax.tree.flatten(inputs)
    avals = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    # No stage needs dX of stage 0, so its whole backward pass would be W. To balance B and W, its B computes dX of its
    # second layer instead.
    is_bumped = num_phases == 3 and computation.is_first and stages.bounds[1] - stages.bounds[0] > 1
    joins_f = computation.is_last and last_joins_f(remat, has_flush=has_flush)
    key = (stage, *computation[1:], avals, structure, is_bumped, remat, joins_f)
    found, group = _TRACED.setdefault(stages.computed, {}), list(stages.group_sizes.items())

    def trace(function: Callable[[StageInputs], Any]) -> tuple[Any, Any]:
        """Return the jaxpr of a function of the inputs, and the shapes of its results."""
        return jax.make_jaxpr(function, axis_env=group, return_shape=True)(inputs)

    with jax.sharding.use_abstract_mesh(NO_MESH):
        if key not in found:
            if not computation.is_last:
                _, y = trace(lambda inputs: computation.forward(inputs, inputs.params, inputs.x, None)[0])
            inputs = inputs._replace(dy=None if computation.is_last else y)
            phases = partial(computation.phases, is_bumped=is_bumped, remat=remat, joins_f=joins_f)
            found[key] = inputs, *trace(phases)
        if (*key, num_phases) not in found:
            inputs, closed, outputs = found[key]
            if num_phases == 2:  # B and W are one phase
                forward, backward, weight = outputs
                outputs = forward, backward._replace(dparams=weight.dparams)
            num_outputs = [len(jax.tree.leaves(of_phase)) for of_phase in outputs]
            flat = flatten(closed, remat=num_phases == 3, axes=group)
            pieces = cut_phases(flat, num_outputs, input_origins(inputs))
            found[*key, num_phases] = StageProgram(stage, inputs, tuple(outputs), pieces)
    return found[*key, num_phases]


def input_origins(inputs: StageInputs) -> list[Origin]:
    """Return the origin of each leaf.

    Values that depend on the dropout key are saved, because random numbers are slow to draw again. So are values that
    depend on the microbatch inputs, because these are the activations of stage 0.
    """
    origins: dict[str, Origin] = {"key": "saved", "x": 0, "dy": 1}

    def of(part: Any, source: Origin) -> Any:
        return jax.tree.map(lambda _: source, part)

    fields = {name: of(part, origins.get(name, "free")) for name, part in inputs._asdict().items()}
    fields["microbatch"]["inputs"] = of(inputs.microbatch["inputs"], "saved")
    return jax.tree.leaves(StageInputs(**fields))


class _Stage(NamedTuple):
    """The computation of a stage, before it is cut into phases."""

    model: Model
    task: Task
    span: tuple[int, ...]  # first layer, and the one after the last
    is_first: bool
    is_last: bool
    is_evaluation: bool  # a forward pass alone

    def layers(self, inputs: StageInputs, params: Any, x: Activations, start: int, stop: int) -> Activations:
        """Apply the layers without a scan, which would stack the weights, and compute dX and dW together."""
        batch, shift = inputs.microbatch, inputs.shift
        keys_B = None if inputs.key is None else example_keys(inputs.key, batch)
        return self.model.apply_layers(params, x, batch, keys_B, start, stop, shift=shift, scan=False)

    def forward(self, inputs: StageInputs, params: Any, x: Any, bump: Any) -> tuple[Activations, Sums | None]:
        """Return the output of the stage, or the loss at the last stage, and the metric sums of the last stage.

        params and x: separate from `inputs` so that they can be differentiated.
        bump: zeros to add to the output of the first layer, or None. Their gradient is that of the layer's output.
        """
        start, stop = self.span
        x = inputs.microbatch["inputs"] if self.is_first else x
        if bump is not None:
            first = self.layers(inputs, params, x, start, start + 1)
            x, start = jax.tree.map(lambda x, zeros: x if zeros is None else x + zeros, first, bump), start + 1
        y = self.layers(inputs, params, x, start, stop)
        if not self.is_last:
            return y, None
        sums_of = self.task.evaluation_sums if self.is_evaluation else self.task.sums
        sums = sums_of(y, inputs.microbatch)
        weight = inputs.weight if inputs.scale is None else inputs.weight / inputs.scale
        return mean_loss(sums.loss, weight), sums

    def phases(self, inputs: StageInputs, *, is_bumped: bool, remat: str, joins_f: bool) -> list[StageOutputs]:
        """Return the outputs of F, B and W.

        is_bumped: B computes dX of the second layer. joins_f: B also has the outputs of F, which nothing else reads.
        """
        forward = partial(self.forward, inputs)
        if self.is_evaluation:
            return [self._outputs(*forward(inputs.params, inputs.x, None))]
        bump, (start, _) = None, self.span
        if is_bumped:
            first = partial(self.layers, inputs, inputs.params, inputs.microbatch["inputs"], start, start + 1)

            def zeros(x: jax.ShapeDtypeStruct) -> jax.Array | None:  # other arrays have no gradient
                return jnp.zeros(x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else None

            bump = jax.tree.map(zeros, jax.eval_shape(first))
        function = forward if remat in ("none", "full") else jax.checkpoint(forward, policy=REMAT_POLICIES[remat])
        y, pullback, sums = jax.vjp(function, inputs.params, inputs.x, bump, has_aux=True)
        dy = jnp.ones(y.shape, y.dtype) if self.is_last else inputs.dy
        dparams, dx, dbump = pullback(dy)
        of_forward, of_backward = self._outputs(y, sums), StageOutputs(dx=dbump if self.is_first else dx)
        if joins_f:
            of_forward, of_backward = StageOutputs(), of_backward._replace(sums=sums)
        elif remat == "full":  # a separate F: then all of jax.vjp is part of B, which recomputes F
            of_forward = self._outputs(*forward(inputs.params, inputs.x, None))
        return [of_forward, of_backward, StageOutputs(dparams=unscaled(dparams, inputs.scale))]

    def _outputs(self, y: Activations, sums: Sums | None) -> StageOutputs:
        return StageOutputs(sums=sums) if self.is_last else StageOutputs(y=y)
