"""Sizes of the groups of devices that compute a replica, or a stage of a pipeline, together."""

from collections.abc import Iterator, Mapping

from jaxpar.choose.candidates import Space
from jaxpar.choose.costs.layers import Layers
from jaxpar.core.mesh import CONTEXT, DATA, TENSOR

GROUP_SIZES = (1, 2, 4, 8)  # devices of a tensor or context axis
LEAST_POSITIONS = 8192  # positions from which a context axis is compared


def group_sizes(space: Space) -> Iterator[dict[str, int]]:
    """Yield the sizes of the tensor and the context axis to compare, without those of 1.

    They are those of groups on one host, unless the user set all of them.
    """
    per_host = space.num_devices // space.machine.cluster.num_processes
    for tensor in space.choices("mesh.tensor", tensor_sizes(space)):
        for context in space.choices("mesh.context", context_sizes(space)):
            sizes = {axis: size for axis, size in ((TENSOR, tensor), (CONTEXT, context)) if size > 1}
            is_given = all(f"mesh.{axis}" in space.kept for axis in sizes)
            if (space.num_devices if is_given else per_host) % (tensor * context) == 0:
                yield sizes


def tensor_sizes(space: Space) -> list[int]:
    """Return the sizes of the tensor axis to compare: groups on one host, with a part of each array on each device.

    Devices that share cores gain nothing from it.
    """
    cluster, split = space.machine.cluster, space.problem.model.tensor
    if split is None or cluster.platform == "cpu":
        return [1]
    numbers = [cluster.num_devices // cluster.num_processes, *split.counts.values()]
    return [size for size in GROUP_SIZES if not any(number % size for number in numbers)]


def context_sizes(space: Space) -> list[int]:
    """Return the sizes of the context axis to compare: for long texts, whose attention the axis allows.

    Devices that share cores gain nothing from it.
    """
    cluster, inputs = space.machine.cluster, space.problem.batch["inputs"]
    is_text = inputs.ndim == 2 and space.problem.model.tensor is not None and space.problem.task.head != "token"
    if not is_text or inputs.shape[1] < LEAST_POSITIONS or cluster.platform == "cpu":
        return [1]
    return [size for size in GROUP_SIZES if cluster.num_devices // cluster.num_processes % size == 0]


def layers_in(space: Space, axes: Mapping[str, int]) -> Layers:
    """Return the layers as a device of a mesh computes them."""
    return space.layers.in_group(axes.get(TENSOR, 1), axes.get(CONTEXT, 1))


def named_with_groups(name: str, axes: Mapping[str, int]) -> str:
    """Return the name of a candidate with the sizes of its axes: `ddp, tensor 4 x 2 replicas`."""
    sizes = [f"{axis} {axes[axis]}" for axis in (TENSOR, CONTEXT) if axis in axes]
    return ", ".join([name, *sizes]) + (f" x {axes[DATA]} replicas" if axes[DATA] > 1 else "")
