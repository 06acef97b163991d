"""Checks of config.mesh.tensor and config.mesh.context, whose devices compute a replica together (core/groups.py)."""

from collections.abc import Mapping

from ml_collections import ConfigDict

from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.mesh import CONTEXT, GROUP_AXES, TENSOR
from jaxpar.core.optimizer import OPTIMIZERS
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, check_choice
from jaxpar.exchange.named import EXCHANGES, QUANTIZED
from jaxpar.models.group import TensorSplit
from jaxpar.strategies import exchanges


def check_group(config: ConfigDict, axis: str) -> None:
    """Raise UserError for an exchange or implementation that replicas of several devices on `axis` cannot have."""
    implementation = config.data_parallel.implementation
    check_choice("exchange", config.exchange, EXCHANGES)
    if not EXCHANGES[config.exchange].on_gradients:
        names = ", ".join(name for name, one in EXCHANGES.items() if one.on_gradients)
        raise UserError(
            f"config.exchange is {config.exchange!r}, which needs whole arrays; it must be one of {names} with "
            f"config.mesh.{axis}={config.mesh[axis]}"
        )
    # On the tensor axis, a block has elements of split and of whole arrays, which would then differ in a group.
    for key in QUANTIZED if axis == TENSOR else ():
        if exchanges.given(config).get(key):
            raise UserError(
                f"config.exchange_options.{key} is True; it must be False with config.mesh.tensor={config.mesh.tensor}"
            )
    if implementation in ("sharding", "pmap"):
        raise UserError(
            f"config.data_parallel.implementation is {implementation!r}; it must be 'auto' or 'shard_map' with "
            f"config.mesh.{axis}={config.mesh[axis]}"
        )


def check_group_of_stage(config: ConfigDict) -> None:
    """Raise UserError for an exchange or option that a pipeline whose stages have several devices cannot have."""
    for axis in (axis for axis in GROUP_AXES if config.mesh[axis] != 1):
        check_group(config, axis)
        size = config.mesh[axis]
        if config.pipeline.trace:
            raise UserError(
                f"config.pipeline.trace is {config.pipeline.trace}; it must be 0 with config.mesh.{axis}={size}"
            )


def summary(axes: Mapping[str, int]) -> str:
    """Return what the devices of a group divide, to continue the summary of a plan; empty without a group."""
    words = {TENSOR: "layers", CONTEXT: "texts"}
    return "".join(f"; {word} split over {axes[axis]} devices" for axis, word in words.items() if axis in axes)


def check_split(name: str, size: int, config: ConfigDict, split: TensorSplit | None) -> None:
    """Raise UserError if `size` devices cannot divide the model of a config. name: of the setting with this size."""
    if split is None:
        raise UserError(
            f"{name} is {size}; it must be 1 with config.model.name={config.model.name!r}, whose layers compute on one "
            "device only"
        )
    for key, number in split.counts.items():
        if number % size:
            raise UserError(f"{name} is {size}; it must divide config.model.{key}, {number}")


def replica_group(config: ConfigDict, shapes: Problem, axes: Mapping[str, int]) -> ReplicaGroup:
    """Return the devices of a replica. Raises UserError if they cannot divide the model, the task or the optimizer."""
    split, size = shapes.model.tensor, axes.get(TENSOR, 1)
    present = [axis for axis in GROUP_AXES if axis in axes]
    if TENSOR in axes or (present and split is None):
        check_split(f"config.mesh.{present[-1]}", axes[present[-1]], config, split)
    if CONTEXT in axes and shapes.batch["inputs"].ndim != 2:
        raise UserError(
            f"config.mesh.context is {axes[CONTEXT]}; it must be 1 with config.model.name={config.model.name!r}, whose "
            "inputs are not texts"
        )
    if CONTEXT in axes and shapes.task.head == "token":
        raise UserError(
            f"config.mesh.context is {axes[CONTEXT]}; it must be 1 with config.task={config.task!r}, which counts "
            "entities of whole texts"
        )
    if size > 1 and not OPTIMIZERS[config.optimizer.name].elementwise:
        names = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.elementwise)
        raise UserError(
            f"config.optimizer.name is {config.optimizer.name!r}, which needs whole arrays; it must be one of {names} "
            f"with config.mesh.tensor={size}"
        )
    return ReplicaGroup(shapes, axes)
