"""Prices published runs of Megatron-LM before sequence parallelism, at the rates that the planner assumes.

The program is not jaxpar's. Kernels are those of ParallelTransformerLayer with all its fusions, dropout and full
recomputation, and of the loss (bigscience-workshop/Megatron-DeepSpeed at 8387ae17, megatron/model/transformer.py and
megatron/mpu/cross_entropy.py). PyTorch runs them one by one, so that each reads and writes the memory. On a tensor
axis, each device computes norms, dropout and residual additions of all positions, and waits for two all-reduces of
them in each pass (Shoeybi et al., "Megatron-LM", 2019, section 3).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpar.choose.costs.pipeline_steps import dispatched_seconds
from jaxpar.choose.costs.rates import collective_seconds, memory_seconds, product_seconds
from jaxpar.cluster import Cluster
from jaxpar.core.ring import PERMUTE, ring_sends
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Times
from scripts.bench.papers.planned import row_cluster

TILES, PROCESSORS = ((128, 256), (256, 128)), 108  # of results, the most efficient ones, and of an A100
BYTES = 2.0  # of a value in 16 bits
ALL_REDUCES = 2  # of a block in a pass; the backward pass also repeats those of the forward pass
# Bytes that Adam moves for each parameter of a shard: gradient, momenta and master weight in float32, the three that
# are written, the narrow weight; and before it, the gradient is widened, and its norm is computed and applied.
ADAM_BYTES = 16 + 12 + 2 + 6 + 4 + 8


class PassBytes(NamedTuple):
    """Bytes that the kernels besides products move in a pass of a block, for each byte of three arrays.

    A dropout also writes, and later reads, a mask of one byte a value.
    """

    all_positions: float  # [B, T, D], on every device of the tensor axis
    divided: float  # the same values, divided by the size of the axis
    scores: float  # [B, heads / t, T, T]


# Two norms (2), two additions with bias and dropout (3.5); bias and GELU of 4 D (8), a copy of heads (2); softmax (2),
# its dropout (2.5).
FORWARD = PassBytes(2 * (2 + 3.5), 8 + 2, 2 + 2.5)
# Two norms (3, and 2 for gain and bias), two additions (2.5, and 1 for the bias), two sums of the gradients of both
# branches (3); bias and GELU (12, and 4 for the bias), heads (2), joining queries, keys and values (6, and 3 for the
# bias); softmax (3), its dropout (2.5).
BACKWARD = PassBytes(2 * (5 + 3.5 + 3), 16 + 2 + 9, 3 + 2.5)
ALIBI = PassBytes(0, 0, 2)  # baddbmm copies biases to the scores, and its product reads them
# Bytes of each logit besides its product: widened (6), maximum (4), subtraction (8), exponential (8), sum (4), division
# (8); then the gradient is scaled (8) and narrowed (6).
LOSS_FORWARD, LOSS_BACKWARD = 6 + 4 + 8 + 8 + 4 + 8, 8 + 6


class PhaseTimes(NamedTuple):
    """Seconds of the forward pass, and of the backward pass with its recomputation."""

    forward: float
    backward: float


def values(table: Mapping[str, Any]) -> list[float]:
    """Return the tokens/s of a GPU for each row of a table."""
    return [priced_rate(row, table["models"][row["model"]]) for row in table["rows"]]


def priced_rate(row: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """Return the tokens/s of a GPU.

    row: its `cluster`; sizes of the axes, `tensor` and `stages`; `size`, the texts of a microbatch; `microbatches` of a
    replica; `cuts`, the blocks of a stage, with embedding and head of `cuts_ends` blocks each; whether replicas share
    the optimizer state (`zero1`), and add up gradients in float32 (`float32_gradients`). model: `features`, `heads`,
    `layers`, `tokens` of a text and `words`; whether there is `alibi`; and `transfers`, how often a stage blocks for a
    microbatch to send or receive.
    """
    priced = MegatronRun(row, {**model, "heads": row.get("heads", model["heads"])})
    texts = row["size"] * row["microbatches"] / (row["tensor"] * row["stages"])
    return float(texts * model["tokens"] / priced.step_seconds())


def wave_factor(rows: float, columns: float) -> float:
    """Return the time of a product / that without partial tiles, and without a partial wave of tiles.

    Source: NVIDIA, "Matrix Multiplication Background User's Guide", sections on the quantization of tiles and waves.
    """

    def occupied(tile: tuple[int, int]) -> float:
        tiles = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
        return math.ceil(tiles / PROCESSORS) * PROCESSORS * math.prod(tile)

    return min(map(occupied, TILES)) / (rows * columns)


class MegatronRun:
    """A published run, and what its parts take. Devices of a tensor axis are neighbours, then replicas of a stage."""

    def __init__(self, row: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """See `priced_rate`."""
        self.row, self.model = row, model
        self.cluster: Cluster = row_cluster(row)
        self.tensor, self.stages = row["tensor"], row["stages"]
        self.replicas = self.cluster.num_devices // (self.tensor * self.stages)
        self.rows = row["size"] * model["tokens"]  # of the products of a microbatch
        self.hidden_bytes = BYTES * self.rows * model["features"]

    def step_seconds(self) -> float:
        """Return the time of a step."""
        starts = [0, *range(self.row["cuts"] - self.row["cuts_ends"], self.model["layers"], self.row["cuts"])]
        assert len(starts) == self.stages, (starts, self.stages)
        sizes = [end - start for start, end in itertools.pairwise([*starts, self.model["layers"]])]
        times = [self._stage(stage, size) for stage, size in enumerate(sizes)]
        number = self.row["microbatches"]
        if self.stages == 1:
            actions = number * sum(times[0])
        else:
            table = make_table("1f1b", num_devices=self.stages, num_microbatches=number, num_chunks=1)
            transfer = self.transfer_seconds()
            forward, backward = (list(values) for values in zip(*times, strict=True))
            actions = dispatched_seconds(table, Times(forward, backward, [0.0] * self.stages), transfer)
            actions += self.model["transfers"] * number * transfer
        return actions + self._exchange_and_update(max(map(self._stage_parameters, range(self.stages), sizes)))

    def block(self) -> PhaseTimes:
        """Return the times of a block, without waiting for other devices."""
        features, tokens = self.model["features"], self.model["tokens"]
        local, heads = features / self.tensor, self.row["size"] * self.model["heads"] / self.tensor
        shapes = [(features, 3 * local), (local, features), (features, 4 * local), (4 * local, features)]
        forward_products, backward_products = self.products(shapes)
        scores = self._product(heads * tokens, features / self.model["heads"], tokens, heads)
        arrays = (self.hidden_bytes, self.hidden_bytes / self.tensor, BYTES * heads * tokens**2)

        def moved(*passes: PassBytes) -> float:
            return self._memory(sum(times * of for one in passes for times, of in zip(one, arrays, strict=True)))

        forward = forward_products + 2 * scores + moved(FORWARD, *([ALIBI] if self.model.get("alibi") else []))
        return PhaseTimes(forward, forward + backward_products + 4 * scores + moved(BACKWARD))

    def products(self, shapes: Sequence[tuple[float, float]]) -> PhaseTimes:
        """Return the times of products with kernels of these shapes, and of the products of their gradients."""
        forward = sum(self._kernel_product(self.rows, *shape) for shape in shapes)
        of_inputs = sum(self._kernel_product(self.rows, columns, inner) for inner, columns in shapes)
        of_kernels = sum(self._kernel_product(inner, self.rows, columns) for inner, columns in shapes)
        return PhaseTimes(forward, of_inputs + of_kernels)

    def all_reduce_seconds(self) -> float:
        """Return the time of an all-reduce of a microbatch on a tensor axis."""
        groups = [range(first, first + self.tensor) for first in range(0, self.cluster.num_devices, self.tensor)]
        return self._collective("all-reduce", 2, groups, self.hidden_bytes)

    def transfer_seconds(self) -> float:
        """Return the time in which a device of a tensor axis sends its part of a microbatch to the next stage."""
        ahead = self.replicas * self.tensor
        pairs = [(device, device + ahead) for device in range(self.cluster.num_devices - ahead)]
        return collective_seconds(self.cluster, PERMUTE, pairs, self.hidden_bytes / self.tensor)

    def _stage(self, stage: int, num_blocks: int) -> PhaseTimes:
        """Return the times of a stage, in which each microbatch adds its gradients to those of the others."""
        (forward, backward), waiting = self.block(), ALL_REDUCES * self.all_reduce_seconds()
        forward, backward = num_blocks * (forward + waiting), num_blocks * (backward + 2 * waiting)
        if stage == self.stages - 1:
            words = self.model["words"] / self.tensor
            of_head = self.products([(self.model["features"], words)])
            forward += of_head.forward + self._memory(LOSS_FORWARD * self.rows * words)
            backward += of_head.backward + self._memory(LOSS_BACKWARD * self.rows * words)
        added = 2 * self._gradient_bytes + BYTES
        return PhaseTimes(forward, backward + self._memory(added * self._stage_parameters(stage, num_blocks)))

    @property
    def _gradient_bytes(self) -> float:
        return 4.0 if self.row.get("float32_gradients") else BYTES

    def _stage_parameters(self, stage: int, num_blocks: int) -> float:
        """Return how many parameters a device of a stage has."""
        features = self.model["features"]
        has_words = stage in (0, self.stages - 1)
        return (12 * num_blocks * features**2 + has_words * self.model["words"] * features) / self.tensor

    def _exchange_and_update(self, parameters: float) -> float:
        """Return the time after the last action, if replicas send 16 bits, and those of ZeRO-1 gather the weights."""
        ahead = range(self.tensor)
        groups = [
            [first + replica * self.tensor + own for replica in range(self.replicas)]
            for first in range(0, self.cluster.num_devices, self.replicas * self.tensor)
            for own in ahead
        ]
        shards = self.replicas if self.row.get("zero1") else 1
        is_reduced_to_shards = shards > 1 and not self.row.get("float32_gradients")
        kind, passes = ("reduce-scatter", 1) if is_reduced_to_shards else ("all-reduce", 2)
        seconds = self._collective(kind, passes, groups, BYTES * parameters)
        if shards > 1:
            seconds += self._collective("all-gather", 1, groups, BYTES * parameters)
        return seconds + self._memory(ADAM_BYTES * parameters / shards)

    def _collective(self, kind: str, passes: int, groups: Any, nbytes: float) -> float:
        if len(groups[0]) == 1:
            return 0.0
        sent, _ = ring_sends(passes, len(groups[0]), nbytes)
        return collective_seconds(self.cluster, kind, groups, sent)

    def _memory(self, nbytes: float) -> float:
        return memory_seconds(self.cluster, nbytes)

    def _kernel_product(self, rows: float, inner: float, columns: float) -> float:
        return wave_factor(rows, columns) * self._product(rows, inner, columns)

    def _product(self, rows: float, inner: float, columns: float, number: float = 1) -> float:
        """Return the time of a product, which takes at least as long as reading its operands and writing it.

        number: of products of a batch, which have these rows together.
        """
        moved = BYTES * (rows * inner + number * inner * columns + rows * columns)
        seconds = product_seconds(self.cluster, "product", "bfloat16", 2 * rows * inner * columns)
        return max(seconds, self._memory(moved))
