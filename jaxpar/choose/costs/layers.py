"""The times and sizes of the layers of a model, for any number of examples and each kind of rematerialization.

The sizes are those of the traced layers. The times have one of three sources: the operations of the traced layers at
the rates of a GPU (traced_layers.py), measurements on this machine (calibrate.py), or the file of a profile.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpar.choose.costs.layer_programs import (
    BACKWARD,
    FORWARD,
    LayerPrograms,
    kept_by_dtype,
    kept_bytes,
    loss_program,
    stash_spans,
)
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.core.context import part_shapes
from jaxpar.core.groups import MeshGroup, ReplicaGroup
from jaxpar.core.mesh import CONTEXT, DATA, TENSOR
from jaxpar.core.state import nbytes
from jaxpar.core.step import Problem, abstract
from jaxpar.exchange.fetch import AS_STORED, fetched
from jaxpar.measure.operations import (
    Residuals,
    bytes_gathered,
    loop_bytes,
    residuals,
)
from jaxpar.models.model import Model
from jaxpar.strategies.pipeline.executor.partition import layer_flops
from jaxpar.strategies.pipeline.executor.stage_programs import StageProgram
from jaxpar.tasks import Task

KINDS_OF_REMAT = ("none", "dots", "full")
SIZES = (4, 8)  # numbers of examples for which layers are traced
ALONE = MeshGroup(1)  # a device that computes whole layers

T = TypeVar("T")


Stashes = tuple[Mapping[str, float], ...]  # bytes of each stash by dtype (`stash_spans`)


class LayerMemory(NamedTuple):
    """Bytes that a layer holds besides its state, and numbers of arrays, for which kernels are launched."""

    computed: float  # bytes that the forward pass saves without rematerialization, which are recomputed with it
    narrowed: float  # bytes of copies of the weights in the dtype of the computation
    stashes: Stashes = ({},)  # what it saves
    looped: float = 0.0  # bytes with which the loop of a loss over a vocabulary works (Residuals)
    score_gradients: float = 0.0  # bytes of those of attention without a kernel (Residuals)
    num_weights: int = 0  # arrays of its weights
    num_saved: tuple[int, ...] = (0,)  # arrays of each stash
    is_lookup: bool = False  # whether it only looks up its weights, such as those of tokens
    gathered: float = 0.0  # bytes of outputs of all positions of a tensor axis, during the backward pass


class PhaseSeconds(NamedTuple):
    """Seconds of F, B and W of a layer. B is all of a fused backward pass, or a half of it, and W is the rest."""

    forward: float
    backward: float
    weight: float


class LayerWork(NamedTuple):
    """The work of a pipeline for a microbatch of a replica, by layer."""

    layers: Sequence[LayerProfile]  # times and sizes
    memory: Sequence[LayerMemory]  # what they hold in addition
    seconds: Sequence[PhaseSeconds]  # times of F, B and W
    remat: str  # none, dots or full


def resized(batch: Mapping[str, Any], size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch with `size` examples."""
    return {name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for name, x in batch.items()}


class Layers:
    """The layers of a model on a device, without times.

    Sizes are linear in the number of examples, except those of the last layer: the loss of many examples is computed in
    chunks. So all layers are traced for two numbers of examples, and the last one for each number.

    In all methods, size is the number of examples that a layer computes at a time, remat is none, dots or full, and
    is_split states whether W is separate from B.
    """

    remats: tuple[str, ...] = KINDS_OF_REMAT  # kinds of rematerialization whose times are cheap to find
    # Methods whose results are kept, because tracing takes seconds.
    cached: tuple[str, ...] = (
        *("profile", "work"),
        *("_programs", "_sizes", "_stashes", "_loss_program", "_residual", "_inputs", "_narrowed"),
        *("_of_group", "_chunked", "_score_gradients", "_gathered_texts", "_lookups"),
    )

    def __init__(self, problem: Problem, group: MeshGroup = ALONE) -> None:
        """Trace nothing yet. group: the devices that compute each layer together."""
        self.group = group
        if group != ALONE:
            sizes = {CONTEXT: group.context, TENSOR: group.size}
            axes = {DATA: 1, **{axis: size for axis, size in sizes.items() if size > 1}}
            problem = ReplicaGroup(problem, axes).problem
            problem = problem._replace(batch=part_shapes(problem.batch, group.context))
        self.problem = problem
        for name in self.cached:
            setattr(self, name, cache(getattr(self, name)))

    def in_group(self, size: int, context: int = 1) -> "Layers":
        """Return the layers of a device of a group, which computes them together (core/groups.py).

        size: of its tensor axis; context: of its context axis.
        """
        group = MeshGroup(size, context)
        return self if group == ALONE else self._of_group(group)

    def _of_group(self, group: MeshGroup) -> "Layers":
        """Return the layers of a device that has a part of each. What it computes is assumed to be divided equally."""
        return PartialLayers(self, group)

    def seconds(self, size: int, remat: str) -> Sequence[tuple[float, float]]:
        """Return the seconds of the forward and backward pass of each layer."""
        return [(0.0, 0.0)] * len(self.problem.model.layers)

    def phase_seconds(self, size: int, remat: str, *, is_split: bool) -> list[PhaseSeconds]:
        """Return the seconds of F, B and W of each layer. Unless known, B and W take half of a backward pass each."""
        seconds = self.seconds(size, remat)
        return [PhaseSeconds(forward, backward / 2, backward / 2) for forward, backward in seconds]

    def profile(self, size: int, remat: str) -> list[LayerProfile]:
        """Return the times and sizes of each layer."""
        layers = zip(self._sizes(size, remat), self.seconds(size, remat), strict=True)
        return [layer._replace(forward_s=forward, backward_s=backward) for layer, (forward, backward) in layers]

    def memory(self, size: int, remat: str, *, is_split: bool) -> list[LayerMemory]:
        """Return what each layer holds in addition, and its numbers of arrays."""
        num_phases = 3 if is_split else 2
        of_fields = {
            "computed": [one.stash_bytes for one in self._sizes(size, "none")],
            "narrowed": self._narrowed(),
            "stashes": self._stashes(size, remat, num_phases),
            "score_gradients": [
                at_size(size, *sizes) for sizes in zip(*map(self._score_gradients, SIZES), strict=True)
            ],
            "num_weights": [len(jax.tree.leaves(layer.shapes)) for layer in self.problem.model.layers],
            "num_saved": self._num_saved(remat, num_phases),
            "is_lookup": self._lookups(),
            "gathered": self._gathered(size, remat),
        }
        each = zip(*of_fields.values(), strict=True)
        *layers, last = [LayerMemory(**dict(zip(of_fields, values, strict=True))) for values in each]
        return [*layers, last._replace(looped=self._residual(size, "none", len(layers)).looped)]

    def _score_gradients(self, size: int) -> list[float]:
        return [one.score_gradients for one in self._residuals_alone(size, "none")]

    def residuals(self, size: int, remat: str) -> list[Residuals]:
        """Return what each layer of a replica holds for the backward pass."""
        found = self._residuals_alone(size, remat)
        if self.group.context == 1:
            return found
        if remat == "none":  # keys and values of whole texts stay
            texts = self._by_layer(partial(self._gathered_texts, size))
            found = [of._replace(fused=of.fused + nbytes) for of, nbytes in zip(found, texts, strict=True)]
        *blocks, loss = zip(found, *(self._chunked(one) for one in SIZES), strict=True)
        between = [of._replace(looped=0.0, chunked=at_size(size, few, many)) for of, few, many in blocks]
        return [*between, loss[0]]

    def _residuals_alone(self, size: int, remat: str) -> list[Residuals]:
        """Return the same without the loops of attention to chunks of texts, and without whole texts."""
        return self._by_layer(partial(self._residual, size, remat))

    def _by_layer(self, find: Callable[[int], T]) -> list[T]:
        """Return what a function of the number of a layer returns, by layer: of the first one of equal layers."""
        runs, last = self.problem.model.runs, len(self.problem.model.layers) - 1
        numbers = [min(max(run.start, 1), run.stop - 1) for run in runs for _ in run]
        return [find(number) for number in (0, *numbers[1:last], last)]

    def _chunked(self, size: int) -> list[float]:
        """Return the bytes of the loop in the backward pass of each layer: of attention, or of the loss."""
        programs = self._programs(size, "none", 2)

        def of_program(number: int) -> float:
            program, run = programs.programs.programs[number], partial(programs.programs.run, number, BACKWARD)
            return self._traced(loop_bytes, run, program.inputs, program.cut.saved)

        by_program = {number: of_program(number) for number in programs.numbers}
        return [by_program[number] for number in programs.numbers]

    def work(self, size: int, remat: str, *, is_split: bool) -> LayerWork:
        """Return what a pipeline computes."""
        memory = self.memory(size, remat, is_split=is_split)
        seconds = self.phase_seconds(size, remat, is_split=is_split)
        return LayerWork(self.profile(size, remat), memory, seconds, remat)

    def _programs(self, size: int, remat: str, num_phases: int) -> LayerPrograms:
        batch = resized(self.problem.batch, size)
        return self._traced(LayerPrograms, self.problem, batch, remat=remat, num_phases=num_phases)

    def _sizes(self, size: int, remat: str) -> list[LayerProfile]:
        """Return the profile without times."""
        if size in SIZES:
            programs = self._programs(size, remat, 2)
            return programs.with_times(dict.fromkeys(programs.numbers, (0.0, 0.0)))
        *layers, last = zip(*(self._sizes(one, remat) for one in SIZES), strict=True)
        between = [
            few._replace(
                output_bytes=at_size(size, few.output_bytes, many.output_bytes),
                stash_bytes=at_size(size, few.stash_bytes, many.stash_bytes),
            )
            for few, many in layers
        ]
        stash = kept_bytes(self._loss_program(size, remat, 2), FORWARD, BACKWARD)
        return [*between, last[0]._replace(stash_bytes=stash)]

    def _stashes(self, size: int, remat: str, num_phases: int) -> list[Stashes]:
        if size in SIZES:
            programs = self._programs(size, remat, num_phases)
            return [kept_by_dtype(programs.programs.programs[number], num_phases) for number in programs.numbers]
        *layers, _ = zip(*(self._stashes(one, remat, num_phases) for one in SIZES), strict=True)
        between = [
            tuple(
                {dtype: at_size(size, of_few[dtype], of_many[dtype]) for dtype in of_few} for of_few, of_many in pairs
            )
            for pairs in (zip(few, many, strict=True) for few, many in layers)
        ]
        return [*between, kept_by_dtype(self._loss_program(size, remat, num_phases), num_phases)]

    def _lookups(self) -> list[bool]:
        """Return for each layer whether its inputs are numbers of rows of its weights, without products."""
        model, (inputs, _, _) = self.problem.model, self._inputs(SIZES[0])
        flops = self._traced(layer_flops, model, resized(self.problem.batch, SIZES[0]), inputs)
        has_floats = [any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(of)) for of in inputs]
        return [not (of_layer or floats) for of_layer, floats in zip(flops, has_floats, strict=True)]

    def _gathered(self, size: int, remat: str) -> list[float]:
        """Return the bytes that B of each layer holds of outputs of all positions of a tensor axis."""
        return [0.0] * len(self.problem.model.layers)

    def _num_saved(self, remat: str, num_phases: int) -> list[tuple[int, ...]]:
        """Return the number of arrays that each layer saves in each stash."""
        programs = self._programs(SIZES[0], remat, num_phases)
        saved = [programs.programs.programs[number].cut.saved for number in programs.numbers]
        return [tuple(len(of.get(span, [])) for span in stash_spans(num_phases)) for of in saved]

    def _loss_program(self, size: int, remat: str, num_phases: int) -> StageProgram:
        inputs, batch, _ = self._inputs(size)
        return self._traced(loss_program, self.problem, inputs, batch, remat=remat, num_phases=num_phases)

    def _residual(self, size: int, remat: str, number: int) -> Residuals:
        """Return what a layer holds."""
        model, (inputs, batch, keys_B) = self.problem.model.unrolled().with_remat(remat), self._inputs(size)
        task = self.problem.task if number == len(model.layers) - 1 else None
        function = partial(_apply, model, task, number)
        return self._traced(residuals, function, model.layers[number].shapes, inputs[number], (batch, keys_B))

    def _gathered_texts(self, size: int, number: int) -> float:
        """Return the bytes of keys and values of whole texts that a layer gathers."""
        model, (inputs, batch, keys_B) = self.problem.model.unrolled(), self._inputs(size)
        function, weights = partial(_apply, model, None, number), model.layers[number].shapes
        return self._traced(bytes_gathered, CONTEXT, function, weights, inputs[number], (batch, keys_B))

    def _inputs(self, size: int) -> tuple[list[Any], Any, Any]:
        """Return the shapes of the inputs of all layers, of a batch and of its keys."""
        batch = resized(self.problem.batch, size)
        keys_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
        first, *inputs = self.problem.model.unrolled().inputs(abstract(batch))
        own = partial(jax.tree.map, partial(_own_positions, self.group.size))
        return [first, *map(own, inputs)], batch, keys_B

    def _narrowed(self) -> list[float]:
        """Return the bytes of the arrays that each layer reads in a narrower dtype than float32, in that dtype."""
        model = self.problem.model
        read = model.read_shapes(self.problem.batch)
        narrow = [[x for x in jax.tree.leaves(read[layer.name]) if x.dtype.itemsize < 4] for layer in model.layers]
        return [float(nbytes(arrays)) for arrays in narrow]

    def _traced(self, trace: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return the result of a function that traces layers. The collectives of a group need the names of its axes."""
        if self.group == ALONE:
            return trace(*args, **kwargs)
        found: list[T] = []

        axes = [(CONTEXT, self.group.context), (TENSOR, self.group.size)]
        jax.make_jaxpr(lambda: found.append(trace(*args, **kwargs)), axis_env=axes)()
        return found[0]


def _own_positions(size: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of the positions of a device of the tensor axis, for an array with all of them [B, T, D]."""
    if size == 1 or x.ndim != 3:
        return x
    return jax.ShapeDtypeStruct((x.shape[0], -(-x.shape[1] // size), x.shape[2]), x.dtype)


def at_size(size: int, few: Any, many: Any) -> Any:
    """Return what is linear in the number of examples, for `size` of them, given the values for SIZES."""
    return few + (size - SIZES[0]) / (SIZES[1] - SIZES[0]) * (many - few)


def _apply(model: Model, task: Task | None, number: int, weights: Any, x: Any, others: Any) -> Any:
    """Return the outputs of a layer, given its weights and those that are tied to it, or the loss of the last layer.

    It saves what zero3 saves. XLA recomputes the rest, such as casts, in the backward pass of any exchange.
    """
    layer, (batch, keys_B) = model.layers[number], others
    params = {layer.name: dict(weights)}
    for tie in model.ties:
        if tie.layer == layer.name:
            params.setdefault(tie.source, {})[tie.source_name] = params[layer.name].pop(tie.name)
    outputs = fetched(model, AS_STORED).apply_layers(params, x, batch, keys_B, number, number + 1)
    return outputs if task is None else task.sums(outputs, batch).loss


class ProfiledLayers(Layers):
    """Layers with the times of a profile, which are those of a microbatch of the run with its rematerialization."""

    def __init__(self, problem: Problem, profile: Sequence[LayerProfile]) -> None:
        """profile: in the order of the model."""
        super().__init__(problem)
        self._given = profile

    def seconds(self, size: int, remat: str) -> Sequence[tuple[float, float]]:
        """Return the seconds of the forward and backward pass of each layer."""
        return [(layer.forward_s, layer.backward_s) for layer in self._given]


class PartialLayers(Layers):
    """Layers that a group of devices computes together, each of which takes its part of the time of all of them."""

    def __init__(self, whole: Layers, group: MeshGroup) -> None:
        """whole: the layers on one device."""
        super().__init__(whole.problem, group)
        self._alone = whole

    def seconds(self, size: int, remat: str) -> Sequence[tuple[float, float]]:
        """Return the seconds of the forward and backward pass of each layer."""
        number = self.group.size * self.group.context
        return [(forward / number, backward / number) for forward, backward in self._alone.seconds(size, remat)]
