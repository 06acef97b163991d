"""The times and sizes of the layers of a model, for any number of examples and each kind of rematerialization.

On GPUs, they follow from the operations of the traced layers and the rates of the GPU (jaxpar/analysis/rates.py). On
this machine, they are measured for two numbers of examples. Both are linear in the number of examples.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxpar.analysis.rates import LAUNCH_SECONDS, memory_seconds, product_seconds
from jaxpar.cluster import Cluster
from jaxpar.measure.operations import PASS, Operation, operations
from jaxpar.pipeline.executor.layer_times import BACKWARD, FORWARD, LayerPrograms
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.state import nbytes
from jaxpar.step import Problem

KINDS_OF_REMAT = ("none", "dots", "full")
SIZES = (4, 8)  # numbers of examples for which layers are traced
PASS_KERNELS = 5  # kernels into which the passes of a layer are assumed to be fused
SIZED = ("forward_s", "backward_s", "output_bytes", "stash_bytes")  # what depends on the number of examples


class SplitStash(NamedTuple):
    """Bytes that a layer saves if W is separate from B: from F to B, from F to W, and from B to W."""

    until_backward: float
    until_weight: float
    from_backward: float


class LayerMemory(NamedTuple):
    """What a layer holds besides its state and what its forward pass saves.

    Attributes:
      computed: bytes that the forward pass saves without rematerialization, which are recomputed with it.
      narrowed: bytes of copies of the weights in the dtype of the computation.
      split: what it saves if W is separate from B.
    """

    computed: float
    narrowed: float
    split: SplitStash = SplitStash(0.0, 0.0, 0.0)


class Layers(Protocol):
    """The layers of a model on a device."""

    @property
    def remats(self) -> tuple[str, ...]:
        """Kinds of rematerialization for which `profile` is cheap."""

    def profile(self, size: float, remat: str) -> list[LayerProfile]:
        """Return the times and sizes of each layer.

        Args:
          size: number of examples that a layer computes at a time.
          remat: none, dots or full.
        """

    def memory(self, size: float, remat: str, *, is_split: bool) -> list[LayerMemory]:
        """Return what each layer holds in addition. size, remat: as in `profile`; is_split: W is separate from B."""


def resized(batch: Mapping[str, Any], size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch with `size` examples."""
    return {name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for name, x in batch.items()}


def narrowed_bytes(problem: Problem) -> list[float]:
    """Return the bytes of the arrays that each layer reads in a narrower dtype than float32, in that dtype."""
    read = problem.model.read_shapes(problem.batch)
    narrow = [[x for x in jax.tree.leaves(read[layer.name]) if x.dtype.itemsize < 4] for layer in problem.model.layers]
    return [float(nbytes(arrays)) for arrays in narrow]


class SplitLayers:
    """Sizes of what layers save if W is separate from B, for any number of examples."""

    def __init__(self, problem: Problem) -> None:
        """Trace nothing yet."""
        self._problem = problem
        self._traced = cache(self._trace)

    def _trace(self, remat: str) -> list[list[SplitStash]]:
        of_sizes = []
        for size in SIZES:
            batch = resized(self._problem.batch, size)
            programs = LayerPrograms(self._problem, batch, remat=remat, num_phases=3)
            spans = ((0, 1), (0, 2), (1, 2))  # phases F, B, W
            saved = [
                SplitStash(*(programs.saved_bytes(number, *span) for span in spans)) for number in programs.numbers
            ]
            of_sizes.append(saved)
        return of_sizes

    def sizes(self, size: float, remat: str) -> list[SplitStash]:
        """Return what each layer saves. size, remat: as in `Layers.profile`."""
        share = (size - SIZES[0]) / (SIZES[1] - SIZES[0])
        return [
            SplitStash(*(max(a + share * (b - a), 0.0) for a, b in zip(few, many, strict=True)))
            for few, many in zip(*self._traced(remat), strict=True)
        ]


def memory_of(
    profile: Sequence[LayerProfile], narrowed: Sequence[float], split: Sequence[SplitStash] | None
) -> list[LayerMemory]:
    """Return the memory of layers.

    Args:
      profile: their profile without rematerialization.
      narrowed: the result of `narrowed_bytes`.
      split: what they save if W is separate from B; None if it is not.
    """
    splits = split or [SplitStash(0.0, 0.0, 0.0)] * len(profile)
    return [
        LayerMemory(layer.stash_bytes, copied, of_layer)
        for layer, copied, of_layer in zip(profile, narrowed, splits, strict=True)
    ]


class TracedLayers:
    """Layers on a GPU that need not exist."""

    remats = KINDS_OF_REMAT

    def __init__(self, problem: Problem, cluster: Cluster) -> None:
        """Trace nothing yet. cluster: the GPUs."""
        self._problem, self._cluster = problem, cluster
        self._traced = cache(self._trace)
        self.profile = cache(self._profile)
        self._splits = SplitLayers(problem)
        self._narrowed = narrowed_bytes(problem)

    def memory(self, size: float, remat: str, *, is_split: bool) -> list[LayerMemory]:
        """Return what each layer holds in addition. See `Layers`."""
        return memory_of(
            self.profile(size, "none"), self._narrowed, self._splits.sizes(size, remat) if is_split else None
        )

    def _trace(self, remat: str) -> tuple[list[list[LayerProfile]], dict[tuple[int, int], "_Kernels"], list[int]]:
        """Return the sizes of the layers for each of SIZES, and the kernels of each program and phase."""
        traced = [LayerPrograms(self._problem, resized(self._problem.batch, size), remat=remat) for size in SIZES]
        numbers = traced[0].numbers
        kernels = {
            (number, phase): _Kernels([counted(programs, number, phase) for programs in traced])
            for number in set(numbers)
            for phase in (FORWARD, BACKWARD)
        }
        nothing = dict.fromkeys(numbers, (0.0, 0.0))
        return [programs.with_times(nothing) for programs in traced], kernels, numbers

    def _profile(self, size: float, remat: str) -> list[LayerProfile]:
        of_sizes, kernels, numbers = self._traced(remat)
        share = (size - SIZES[0]) / (SIZES[1] - SIZES[0])
        seconds = {key: of_phase.seconds(share, self._cluster) for key, of_phase in kernels.items()}
        return [
            between(few, many, share)._replace(forward_s=seconds[number, FORWARD], backward_s=seconds[number, BACKWARD])
            for few, many, number in zip(*of_sizes, numbers, strict=True)
        ]


def between(few: LayerProfile, many: LayerProfile, share: float) -> LayerProfile:
    """Return the layer with what depends on the number of examples at `share` of the way from `few` to `many`."""
    values = {name: getattr(few, name) + share * (getattr(many, name) - getattr(few, name)) for name in SIZED}
    return few._replace(**{name: max(value, 0.0) for name, value in values.items()})


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

    def seconds(self, share: float, cluster: Cluster) -> float:
        """Return the time at `share` of the way between the two sizes."""
        total = 0.0
        rows = (few + share * (many - few) for few, many in (self._flops, self._nbytes, self._calls))
        for (kind, dtype), flops, moved, calls in zip(self._kinds, *rows, strict=True):
            memory = memory_seconds(cluster, float(moved))
            if kind == PASS:
                total += memory + PASS_KERNELS * LAUNCH_SECONDS * bool(moved)
            else:
                total += max(product_seconds(cluster, kind, dtype, float(flops)), memory) + calls * LAUNCH_SECONDS
        return total
