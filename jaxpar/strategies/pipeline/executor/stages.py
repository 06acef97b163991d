"""Assigns the layers of a model, and so its parameters, to the devices of a pipeline.

Devices whose stages differ only in their position in the model, or not at all, are of the same *kind*. Devices of a
kind share one program, which is traced for the first of them, its *example*, and uses the layer names of the example.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core.groups import ReplicaGroup
from jaxpar.models.model import Model, Params, Tie
from jaxpar.strategies.pipeline.tables.table import StageDevices
from jaxpar.tasks import Task


class Stages:
    """The stages of a model, and the device and chunk of each stage."""

    def __init__(
        self,
        model: Model,
        bounds: Sequence[int],
        placement: np.ndarray,
        inputs: Sequence[Any],
        task: Task,
        group: ReplicaGroup | None = None,
    ):
        """Assign the layers.

        inputs: input shapes of every layer, from `Model.inputs`, for a batch of any size. group: the devices that
        compute each layer together; None: one device does.
        """
        self.model, self.task = model, task  # the task computes the loss from the output of the last stage
        self.computed = group.problem.model if group else model  # the model as a device of the group computes it
        self.group_sizes = group.sizes if group else {}  # sizes of the axes of the group
        self.bounds = tuple(bounds)  # stage j is model.layers[bounds[j]:bounds[j + 1]]
        self.placement = placement  # stage by [device, chunk]
        self._inputs = inputs
        self.examples: list[int] = []  # by kind, the device that its program is traced for
        self.kinds: list[int] = []  # kind by device
        for device in range(len(placement)):
            equal = (kind for kind, other in enumerate(self.examples) if self._are_equal(device, other))
            kind = next(equal, len(self.examples))
            if kind == len(self.examples):
                self.examples.append(device)
            self.kinds.append(kind)

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return int(self.placement.max()) + 1

    @property
    def layers(self) -> list[list[str]]:
        """The names of the layers of each stage."""
        names = [layer.name for layer in self.model.layers]
        return [names[start:stop] for start, stop in itertools.pairwise(self.bounds)]

    @property
    def has_replicas(self) -> bool:
        """Whether some stages are on several devices."""
        return self.placement.size > self.num_stages

    @cached_property
    def groups(self) -> list[list[int]]:
        """The devices in groups that hold the same layers: the replicas of each stage, or each device alone."""
        if not self.has_replicas:
            return [[device] for device in range(len(self.placement))]
        devices = StageDevices(self.placement)
        return [devices.of(stage) for stage in range(self.num_stages)]

    def span(self, device: int, chunk: int) -> tuple[int, int]:
        """Return the range of layers of a chunk: [start, stop)."""
        stage = self.placement[device, chunk]
        return self.bounds[stage], self.bounds[stage + 1]

    @property
    def program_numbers(self) -> np.ndarray:
        """The number of the program that each [device, chunk] runs: devices of a kind share their programs."""
        num_chunks = self.placement.shape[1]
        return np.array(self.kinds)[:, None] * num_chunks + np.arange(num_chunks)

    @cached_property
    def shifts(self) -> np.ndarray:
        """Layer-index offset of each [device, chunk] from the same chunk of the representative device of its kind."""
        starts = np.array(self.bounds, np.int32)[self.placement]
        return starts - starts[[self.examples[kind] for kind in self.kinds]]

    def copies(self, device: int) -> list[Tie]:
        """Return the ties whose source is on another device, so that this device holds a copy of the array."""
        layers = self.layer_names(device)
        return [tie for tie in self.model.ties if tie.layer in layers and tie.source not in layers]

    @property
    def copied(self) -> list[tuple[str, str]]:
        """The tied arrays that several devices hold, as (layer, name)."""
        return sorted({(tie.source, tie.source_name) for device in self.examples for tie in self.copies(device)})

    def select(self, params: Params, device: int) -> Params:
        """Return the parameters on a device: those of its layers, and copies of tied arrays of other devices."""
        own = {name: params[name] for name in self.layer_names(device)}
        for tie in self.copies(device):
            own.setdefault(tie.source, {})[tie.source_name] = params[tie.source][tie.source_name]
        return own

    def init(
        self, key: jax.Array, kind: int, shifts: jax.Array, part: Callable[[Params], Params] | None = None
    ) -> Params:
        """Return the initial parameters on a device of this kind.

        shifts: the device's row of `shifts`. part: as in `Model.init_layers`.
        """
        device = self.examples[kind]
        held: Params = {}
        for chunk in range(self.placement.shape[1]):
            held |= self.model.init_layers(key, *self.span(device, chunk), shift=shifts[chunk], part=part)
        for tie in self.copies(device):
            source = next(i for i, layer in enumerate(self.model.layers) if layer.name == tie.source)
            array = self.model.init_layers(key, source, source + 1, part=part)[tie.source][tie.source_name]
            held.setdefault(tie.source, {})[tie.source_name] = array
        return held

    def part(self, held: Params, device: int, chunk: int) -> Params:
        """Return the subset of a device's parameters that one of its chunks uses."""
        names = {layer.name for layer in self.model.layers[slice(*self.span(device, chunk))]}
        used = {name: held[name] for name in names}
        for tie in self.model.ties:
            if tie.layer in names and tie.source not in names:
                used.setdefault(tie.source, {})[tie.source_name] = held[tie.source][tie.source_name]
        return used

    def local_names(self, device: int) -> dict[str, str]:
        """Return the layer names of a device, keyed by the names in the program of its kind (those of the example)."""
        example = self.examples[self.kinds[device]]
        names = dict(zip(self.layer_names(example), self.layer_names(device), strict=True))
        return names | {tie.source: tie.source for tie in self.copies(device)}

    def layer_names(self, device: int) -> list[str]:
        """Return the names of the device's layers, chunk by chunk."""
        chunks = range(self.placement.shape[1])
        return [layer.name for chunk in chunks for layer in self.model.layers[slice(*self.span(device, chunk))]]

    def _are_equal(self, a: int, b: int) -> bool:
        """Return whether two devices can share a program. The first, the last and tied stages share none."""
        if self.placement[a].tolist() == self.placement[b].tolist():
            return True
        tied = {name for tie in self.model.ties for name in (tie.layer, tie.source)}
        ends = {0, self.num_stages - 1}
        for chunk in range(self.placement.shape[1]):
            if {self.placement[a, chunk], self.placement[b, chunk]} & ends:
                return False
            ours, theirs = (self.model.layers[slice(*self.span(device, chunk))] for device in (a, b))
            if len(ours) != len(theirs) or tied & {layer.name for layer in (*ours, *theirs)}:
                return False
            if any(mine[1:] != other[1:] for mine, other in zip(ours, theirs, strict=True)):
                return False
            if self._inputs[self.span(a, chunk)[0]] != self._inputs[self.span(b, chunk)[0]]:
                return False
        return True


def sum_over_stages(gradients: Sequence[Params]) -> Params:
    """Return the gradient of the layers of these stages; that of a tied array is the sum over stages that use it."""
    total: Params = {}
    for gradient in gradients:
        for layer, arrays in gradient.items():
            of_layer = total.setdefault(layer, {})
            for name, array in arrays.items():
                of_layer[name] = jax.tree.map(jnp.add, of_layer[name], array) if name in of_layer else array
    return total
