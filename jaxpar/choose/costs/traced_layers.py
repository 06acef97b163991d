"""The layers of a model on a GPU that need not exist: their operations at its rates (rates.py)."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxpar.choose.costs.layers import ALONE, SIZES, Layers, PhaseSeconds, at_size
from jaxpar.choose.costs.rates import launch_seconds, memory_seconds, product_seconds
from jaxpar.cluster import Cluster
from jaxpar.core.groups import MeshGroup
from jaxpar.core.step import Problem
from jaxpar.measure.operations import PASS, SLICE, Operation, operations
from jaxpar.strategies.pipeline.executor.stage_programs import StageProgram

# Kernels into which the passes of a layer with products are assumed to be fused, by the number of phases. Compiled for
# H100s, unrolled layers of BERT base, GPT and Llama have 18, 21 and 18 forward, and 14, 19 and 8 backward. In stages,
# layers of BERT base and of a GPT have 16 and 14 forward, and 19 and 12 backward; those of a GPT have 5 in B and 9 in
# W. Passes of other layers are fused with those of their neighbours.
PASS_KERNELS = {2: (17, 15), 3: (15, 5, 9)}
KERNELS_IN_GROUP = (3, 9)  # those that a tensor or context axis adds to F and B: 20 and 24 in the layers of a GPT
# The bytes that passes of a backward pass move / those that are counted, because XLA computes several reductions of an
# array in one kernel. In the same programs of unrolled layers it is 0.44 to 0.49 (forward: 0.85 to 0.95), but steps on
# a GPU take longer than these programs are predicted to (docs/results/gpu/one_gpu.md). With 0.75, all steps of
# scripts/bench/planned_memory.py --large are predicted within 15%.
BACKWARD_PASSES = 0.75
# Outputs of all positions that B of a stage on a tensor axis holds for each of its layers without rematerialization,
# because XLA on GPUs gathers them early, and computes the gradients of weights late: 2 to 3 in GPTs compiled for H100s.
HELD_IN_GROUP = 2.5


class TracedLayers(Layers):
    """Layers on a GPU that need not exist: their operations at its rates."""

    cached = (*Layers.cached, "_kernels", "_loss_kernels")

    def __init__(self, problem: Problem, cluster: Cluster, group: MeshGroup = ALONE) -> None:
        """Trace nothing yet. cluster: the GPUs."""
        super().__init__(problem, group)
        self._cluster = cluster

    def _of_group(self, group: MeshGroup) -> "TracedLayers":
        """Return the layers of a device of a group, as they are traced."""
        return TracedLayers(self.problem, self._cluster, group)

    def _gathered(self, size: int, remat: str) -> list[float]:
        """Return the bytes that B of each layer holds of outputs of all positions of a tensor axis."""
        if self.group.size == 1 or remat != "none":
            return super()._gathered(size, remat)
        held = HELD_IN_GROUP * self.group.size
        *layers, _ = zip(self._sizes(size, "none"), self._lookups(), strict=True)
        return [*(0.0 if is_lookup else held * layer.output_bytes for layer, is_lookup in layers), 0.0]

    def seconds(self, size: int, remat: str) -> Sequence[tuple[float, float]]:
        """Return the seconds of the forward and backward pass of each layer."""
        return [(forward, backward) for forward, backward in self._priced(size, remat, 2)]

    def phase_seconds(self, size: int, remat: str, *, is_split: bool) -> list[PhaseSeconds]:
        """Return the seconds of F, B and W of each layer. B writes what it hands to W into a stash."""
        if not is_split:
            return super().phase_seconds(size, remat, is_split=False)
        handed = [memory_seconds(self._cluster, sum(last.values())) for *_, last in self._stashes(size, remat, 3)]
        return [
            PhaseSeconds(forward, backward + extra, weight + extra)
            for (forward, backward, weight), extra in zip(self._priced(size, remat, 3), handed, strict=True)
        ]

    def _priced(self, size: int, remat: str, num_phases: int) -> list[list[float]]:
        """Return the seconds of each phase of each layer."""
        kernels = self._kernels(remat, num_phases)
        shares, passes = [1.0, *[BACKWARD_PASSES] * (num_phases - 1)], [*PASS_KERNELS[num_phases]]
        if self.group != ALONE:
            passes[:2] = np.add(passes[:2], KERNELS_IN_GROUP)

        def priced(of_phases: list[_Kernels], shares: Sequence[float]) -> list[float]:
            each = zip(of_phases, passes, shares, strict=True)
            seconds = [one.seconds(size, self._cluster, number, share) for one, number, share in each]
            if remat != "none":  # B also has the passes of F, with all of their bytes and kernels
                seconds[1] += of_phases[0].of_passes(size, self._cluster, passes[0], 1 - shares[1])
            return seconds

        seconds = {number: priced(of_phases, shares) for number, of_phases in kernels.items()}
        *numbers, _ = self._programs(SIZES[0], remat, num_phases).numbers
        of_loss = priced(self._loss_kernels(size, remat, num_phases), [1.0] * num_phases)
        if remat == "full":  # its F is part of B
            of_loss[1] += passes[0] * launch_seconds(self._cluster)
        return [*(seconds[number] for number in numbers), of_loss]

    def _kernels(self, remat: str, num_phases: int) -> dict[int, list["_Kernels"]]:
        """Return the kernels of each phase of each program but the last one."""
        of_sizes = [self._programs(size, remat, num_phases) for size in SIZES]
        each = [programs.programs.programs for programs in of_sizes]
        return {
            number: [
                _Kernels([self._traced(_operations, programs[number], phase) for programs in each])
                for phase in range(num_phases)
            ]
            for number in set(of_sizes[0].numbers[:-1])
        }

    def _loss_kernels(self, size: int, remat: str, num_phases: int) -> list["_Kernels"]:
        """Return the kernels of each phase of the last layer, which computes the loss of many examples in chunks."""
        program = self._loss_program(size, remat, num_phases)
        return [_Kernels([self._traced(_operations, program, phase)] * 2) for phase in range(num_phases)]


def _operations(program: StageProgram, phase: int) -> list[Operation]:
    """Return the operations of a phase of a program."""
    saved = {span: x for span, x in program.cut.saved.items() if span[0] < phase <= span[1]}
    return operations(program.cut.run[phase], jax.tree.leaves(program.inputs), saved)


class _Kernels:
    """The operations of a program for SIZES[0] and SIZES[1] examples: kinds, and FLOPs, bytes and calls [size, O]."""

    def __init__(self, of_sizes: list[list[Operation]]) -> None:
        few, many = of_sizes
        self._kinds = [(one.kind, one.dtype, one.head) for one in few]
        self._flops = np.array([[one.calls * one.flops for one in found] for found in (few, many)])
        self._nbytes = np.array([[one.calls * one.nbytes for one in found] for found in (few, many)])
        self._calls = np.array([[one.calls for one in found] for found in (few, many)])

    def of_passes(self, size: int, cluster: Cluster, number: int, share: float) -> float:
        """Return the time of passes alone. number: of their kernels; share: of their bytes that are moved."""
        each = zip(self._kinds, self._nbytes.T, strict=True)
        nbytes = share * sum(at_size(size, *of_sizes) for (kind, *_), of_sizes in each if kind == PASS)
        launched = number if self._flops.any() else 0
        return memory_seconds(cluster, float(nbytes)) + launched * launch_seconds(cluster)

    def seconds(self, size: int, cluster: Cluster, num_passes: int, share: float) -> float:
        """Return the time for `size` examples. num_passes: kernels of passes; share: of their bytes that are moved."""
        total, launch = self.of_passes(size, cluster, num_passes, share), launch_seconds(cluster)
        rows = (at_size(size, few, many) for few, many in (self._flops, self._nbytes, self._calls))
        for (kind, dtype, head), flops, moved, calls in zip(self._kinds, *rows, strict=True):
            memory = memory_seconds(cluster, float(moved))
            if kind == SLICE:
                total += memory + calls * launch
            elif kind != PASS:
                total += max(product_seconds(cluster, kind, dtype, float(flops), head), memory) + calls * launch
        return total
