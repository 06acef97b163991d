"""The times and sizes of the layers of a model, for any number of examples and each kind of rematerialization.

On GPUs, they follow from the operations of the traced layers and the rates of the GPU (jaxpar/analysis/rates.py). On
this machine, they are measured for two numbers of examples. Both are linear in the number of examples. The sizes of
what layers save are those of the layers traced for this number.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxpar.analysis.rates import launch_seconds, memory_seconds, product_seconds
from jaxpar.cluster import Cluster
from jaxpar.layout import Fetch
from jaxpar.measure.operations import PASS, Operation, operations
from jaxpar.measure.residuals import Residuals, residuals
from jaxpar.models.model import Model
from jaxpar.pipeline.executor.layer_times import BACKWARD, FORWARD, LayerPrograms, kept_bytes, loss_program
from jaxpar.pipeline.executor.programs import StageProgram
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.state import nbytes
from jaxpar.step import Problem, abstract
from jaxpar.tasks import Task

KINDS_OF_REMAT = ("none", "dots", "full")
SIZES = (4, 8)  # numbers of examples for which layers are traced
PASS_KERNELS = 5  # kernels into which the passes of a layer are assumed to be fused


class SplitStash(NamedTuple):
    """Bytes that a layer saves if W is separate from B: from F to B, from F to W, and from B to W."""

    until_backward: float
    until_weight: float
    from_backward: float


class LayerMemory(NamedTuple):
    """Bytes that a layer holds besides its state and what its forward pass saves.

    Attributes:
      computed: bytes that the forward pass saves without rematerialization, which are recomputed with it.
      narrowed: bytes of copies of the weights in the dtype of the computation.
      split: what it saves if W is separate from B.
      looped: bytes with which the loop of a loss over a vocabulary works (Residuals).
    """

    computed: float
    narrowed: float
    split: SplitStash = SplitStash(0.0, 0.0, 0.0)
    looped: float = 0.0


class Layers(Protocol):
    """The layers of a model on a device."""

    @property
    def remats(self) -> tuple[str, ...]:
        """Kinds of rematerialization for which `profile` is cheap."""

    def profile(self, size: int, remat: str) -> list[LayerProfile]:
        """Return the times and sizes of each layer.

        Args:
          size: number of examples that a layer computes at a time.
          remat: none, dots or full.
        """

    def memory(self, size: int, remat: str, *, is_split: bool) -> list[LayerMemory]:
        """Return what each layer holds in addition. size, remat: as in `profile`; is_split: W is separate from B."""

    def residuals(self, size: int, remat: str) -> list[Residuals]:
        """Return what each layer of a replica holds for the backward pass. size, remat: as in `profile`."""


def resized(batch: Mapping[str, Any], size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch with `size` examples."""
    return {name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for name, x in batch.items()}


def narrowed_bytes(problem: Problem) -> list[float]:
    """Return the bytes of the arrays that each layer reads in a narrower dtype than float32, in that dtype."""
    read = problem.model.read_shapes(problem.batch)
    narrow = [[x for x in jax.tree.leaves(read[layer.name]) if x.dtype.itemsize < 4] for layer in problem.model.layers]
    return [float(nbytes(arrays)) for arrays in narrow]


class LayerSizes:
    """Sizes of what layers save and hold for any number of examples, without measuring them.

    Sizes are linear in the number of examples, except those of the last layer: the loss of many examples is computed in
    chunks. So all layers are traced for two numbers of examples, and the last one for each number.
    """

    def __init__(self, problem: Problem) -> None:
        """Trace nothing yet."""
        self._problem, self._narrowed = problem, narrowed_bytes(problem)
        self.programs = cache(self._programs)
        self.profile = cache(self._profile)
        self._split = cache(self._split_stashes)
        self._residuals = cache(self._trace_residuals)
        self._residual = cache(self._trace_residual)
        self._inputs = cache(self._trace_inputs)

    def _programs(self, size: int, remat: str) -> LayerPrograms:
        """Return the traced programs of the layers. size, remat: as in `Layers.profile`."""
        return LayerPrograms(self._problem, resized(self._problem.batch, size), remat=remat)

    def _profile(self, size: int, remat: str) -> list[LayerProfile]:
        """Return the sizes of each layer, and no times. See `Layers`."""
        if size in SIZES:
            programs = self.programs(size, remat)
            return programs.with_times(dict.fromkeys(programs.numbers, (0.0, 0.0)))
        *layers, last = zip(*(self.profile(one, remat) for one in SIZES), strict=True)
        between = [
            few._replace(
                output_bytes=_at(size, few.output_bytes, many.output_bytes),
                stash_bytes=_at(size, few.stash_bytes, many.stash_bytes),
            )
            for few, many in layers
        ]
        stash = kept_bytes(self._loss_program(size, remat, 2), FORWARD, BACKWARD)
        return [*between, last[0]._replace(stash_bytes=stash)]

    def _split_stashes(self, size: int, remat: str) -> list[SplitStash]:
        if size in SIZES:
            programs = LayerPrograms(self._problem, resized(self._problem.batch, size), remat=remat, num_phases=3)
            return [_split_stash(programs.programs.programs[number]) for number in programs.numbers]
        *layers, _ = zip(*(self._split(one, remat) for one in SIZES), strict=True)
        between = [
            SplitStash(*(_at(size, *nbytes_of_sizes) for nbytes_of_sizes in zip(few, many, strict=True)))
            for few, many in layers
        ]
        return [*between, _split_stash(self._loss_program(size, remat, 3))]

    def _loss_program(self, size: int, remat: str, num_phases: int) -> StageProgram:
        inputs, batch, _ = self._inputs(size)
        return loss_program(self._problem, inputs, batch, remat=remat, num_phases=num_phases)

    def memory(self, size: int, remat: str, *, is_split: bool) -> list[LayerMemory]:
        """Return what each layer holds in addition. See `Layers`."""
        splits = self._split(size, remat) if is_split else [SplitStash(0.0, 0.0, 0.0)] * len(self._narrowed)
        each = zip(self.profile(size, "none"), self._narrowed, splits, strict=True)
        *first, last = [LayerMemory(layer.stash_bytes, narrowed, split) for layer, narrowed, split in each]
        loss = self._residual(size, "none", len(first))
        return [*first, last._replace(looped=loss.looped)]

    def residuals(self, size: int, remat: str) -> list[Residuals]:
        """Return what each layer of a replica holds for the backward pass. See `Layers`."""
        return self._residuals(size, remat)

    def _trace_residuals(self, size: int, remat: str) -> list[Residuals]:
        runs, last = self._problem.model.runs, len(self._problem.model.layers) - 1
        numbers = [min(max(run.start, 1), run.stop - 1) for run in runs for _ in range(*run)]
        return [self._residual(size, remat, number) for number in (0, *numbers[1:last], last)]

    def _trace_residual(self, size: int, remat: str, number: int) -> Residuals:
        """Return what a layer holds."""
        model, (inputs, batch, keys_B) = self._problem.model.unrolled().with_remat(remat), self._inputs(size)
        task = self._problem.task if number == len(model.layers) - 1 else None
        function = partial(_apply, model, task, number)
        return residuals(function, model.layers[number].shapes, inputs[number], (batch, keys_B))

    def _trace_inputs(self, size: int) -> tuple[list[Any], Any, Any]:
        """Return the shapes of the inputs of all layers, of a batch and of its keys."""
        batch = resized(self._problem.batch, size)
        keys_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
        return self._problem.model.unrolled().inputs(abstract(batch)), batch, keys_B


def _at(size: int, few: Any, many: Any) -> Any:
    """Return what is linear in the number of examples, for `size` of them, given the values for SIZES."""
    return few + (size - SIZES[0]) / (SIZES[1] - SIZES[0]) * (many - few)


def _split_stash(program: StageProgram) -> SplitStash:
    """Return what the phases F, B and W of a program save."""
    return SplitStash(*(kept_bytes(program, *span) for span in ((0, 1), (0, 2), (1, 2))))


def _apply(model: Model, task: Task | None, number: int, weights: Any, x: Any, others: Any) -> Any:
    """Return the outputs of a layer, given its weights and those that are tied to it, or the loss of the last layer.

    It saves what zero3 saves. XLA recomputes the rest, such as casts, in the backward pass of any exchange.
    """
    layer, (batch, keys_B) = model.layers[number], others
    params = {layer.name: dict(weights)}
    for tie in model.ties:
        if tie.layer == layer.name:
            params.setdefault(tie.source, {})[tie.source_name] = params[layer.name].pop(tie.name)
    outputs = model.apply_layers(
        params, x, batch, keys_B, number, number + 1, fetch=Fetch(lambda _shapes, stored: stored)
    )
    return outputs if task is None else task.sums(outputs, batch).loss


class TracedLayers:
    """Layers on a GPU that need not exist."""

    remats = KINDS_OF_REMAT

    def __init__(self, problem: Problem, cluster: Cluster) -> None:
        """Trace nothing yet. cluster: the GPUs."""
        self._cluster = cluster
        self._traced = cache(self._trace)
        self.profile = cache(self._profile)
        self._sizes = LayerSizes(problem)
        self.memory, self.residuals = self._sizes.memory, self._sizes.residuals

    def _trace(self, remat: str) -> tuple[dict[tuple[int, int], "_Kernels"], list[int]]:
        """Return the kernels of each program and phase, and the number of the program of each layer."""
        traced = [self._sizes.programs(size, remat) for size in SIZES]
        numbers = traced[0].numbers
        kernels = {
            (number, phase): _Kernels([counted(programs, number, phase) for programs in traced])
            for number in set(numbers)
            for phase in (FORWARD, BACKWARD)
        }
        return kernels, numbers

    def _profile(self, size: int, remat: str) -> list[LayerProfile]:
        kernels, numbers = self._traced(remat)
        seconds = {key: of_phase.seconds(size, self._cluster) for key, of_phase in kernels.items()}
        return [
            layer._replace(forward_s=seconds[number, FORWARD], backward_s=seconds[number, BACKWARD])
            for layer, number in zip(self._sizes.profile(size, remat), numbers, strict=True)
        ]


def counted(programs: LayerPrograms, number: int, phase: int) -> list[Operation]:
    """Return the operations of a phase of a layer's program."""
    program = programs.programs.programs[number]
    saved = {stash: values for stash, values in program.cut.saved.items() if stash[0] < phase <= stash[1]}
    return operations(partial(programs.programs.run, number, phase), program.inputs, saved)


class _Kernels:
    """The operations of a program for SIZES[0] and SIZES[1] examples: kinds, and FLOPs, bytes and calls [size, O]."""

    def __init__(self, of_sizes: list[list[Operation]]) -> None:
        few, many = of_sizes
        if [one[:2] for one in few] != [one[:2] for one in many]:  # only the larger one has a loss in chunks
            few = [one._replace(calls=one.calls * SIZES[0] / SIZES[1]) for one in many]
        self._kinds = [(one.kind, one.dtype) for one in few]
        self._flops = np.array([[one.calls * one.flops for one in found] for found in (few, many)])
        self._nbytes = np.array([[one.calls * one.nbytes for one in found] for found in (few, many)])
        self._calls = np.array([[one.calls for one in found] for found in (few, many)])

    def seconds(self, size: int, cluster: Cluster) -> float:
        """Return the time for `size` examples."""
        total, launch = 0.0, launch_seconds(cluster)
        rows = (_at(size, few, many) for few, many in (self._flops, self._nbytes, self._calls))
        for (kind, dtype), flops, moved, calls in zip(self._kinds, *rows, strict=True):
            memory = memory_seconds(cluster, float(moved))
            if kind == PASS:
                total += memory + PASS_KERNELS * launch * bool(moved)
            else:
                total += max(product_seconds(cluster, kind, dtype, float(flops)), memory) + calls * launch
        return total
