"""Divides a model into the stages of a pipeline, if config.pipeline.partition=auto by a profile of its layers.

The profile is a file, config.pipeline.profile. If it is not set, the start of a run measures the layers and decides
again, because a plan touches no device. Only divisions that can run are searched.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.errors import UserError, format_count, is_refused
from jaxpar.mesh import DATA, STAGE, sizes
from jaxpar.models.model import Model
from jaxpar.optimizer import make_optimizer
from jaxpar.pipeline.executor.partition import AUTO
from jaxpar.pipeline.search.engine_costs import EngineCosts, continuous_candidates, flushing_candidates, flushing_costs
from jaxpar.pipeline.search.engine_search import EnginePlan, EngineSearch
from jaxpar.pipeline.search.layer_profile import LayerProfile, read_profile
from jaxpar.pipeline.search.stage_costs import sync_seconds
from jaxpar.pipeline.search.stage_search import most_workers
from jaxpar.pipeline.tables.periodic import CONTINUOUS
from jaxpar.pipeline.tables.replicated import WITH_REPLICAS
from jaxpar.pipeline.tables.table import Table
from jaxpar.state import nbytes
from jaxpar.strategies.schedules import (
    AUTO_SCHEDULE,
    UNTIL_CHOSEN,
    check_evaluation,
    configured_replicas,
    configured_table,
)

EQUAL = 0.01  # largest relative difference between a size in a profile and that of the model, for rounded numbers
UNKNOWN_LAYERS = 700  # number of layers to assume while the model is not known
UNSET = {"profile": "", "bandwidth": 0.0, "memory_limit": 0.0}  # keys that only partition auto reads


class Division(NamedTuple):
    """The division of a model into stages, and of a step into actions.

    Attributes:
      table: the table of the schedule; of a possible division while there is no profile.
      partition: config.pipeline.partition, or the cut points of the profile. It remains auto while there is no profile.
      profile: the layers of the profile; empty without one.
      advice: whether data parallelism would be faster by the profile, and by how much; empty if not.
    """

    table: Table
    partition: str
    profile: tuple[LayerProfile, ...] = ()
    advice: str = ""

    @property
    def needs_profile(self) -> bool:
        """Whether a profile is missing."""
        return self.partition == AUTO


def configured_division(config: ConfigDict, cluster: Cluster, model: Model | None) -> Division:
    """Return the table that config.pipeline.schedule selects, and how the layers are divided into stages.

    Args:
      config: the config of the run.
      cluster: the links between its devices decide about the stages of a profile.
      model: the model; None if it is not known.

    Raises:
      UserError: `configured_table` fails, or the sizes or the profile are invalid or cannot be divided.
    """
    c = config.pipeline
    replicas = configured_replicas(config)
    if c.partition != AUTO:
        for key, unset in UNSET.items():
            if c[key] != unset and not (key == "memory_limit" and c.schedule == AUTO_SCHEDULE):
                raise UserError(
                    f"config.pipeline.{key} is {c[key]!r}; it must be {unset!r} without "
                    f"config.pipeline.partition={AUTO!r}"
                    f"{f' or config.pipeline.schedule={AUTO_SCHEDULE!r}' * (key == 'memory_limit')}"
                )
        return Division(configured_table(config, replicas), c.partition)
    if replicas:
        raise UserError(
            f"config.pipeline.replicas is {c.replicas!r}; it must be empty with config.pipeline.partition={AUTO!r}, "
            "which chooses them"
        )
    bandwidth = _bandwidth(config, cluster)
    profile = tuple(read_profile(Path(c.profile), "config.pipeline.profile")) if c.profile else ()
    if profile and model is not None:
        _check_layers(config, profile, model)
    num_layers = len(profile or (model.layers if model is not None else ())) or UNKNOWN_LAYERS
    table = configured_table(config, ())
    _check_sizes(config, table, num_layers)
    candidates = _candidates(config, cluster, table, profile, num_layers)
    first = next(candidates, None)
    if first is None:
        raise _no_replicas(config, num_layers)
    if not profile:
        return Division(configured_table(config, first.replicas), AUTO)
    search = EngineSearch(
        _without_cuts_of_ties(config, profile, model), bandwidth=bandwidth, memory_limit=c.memory_limit or math.inf
    )
    found = search.find(itertools.chain([first], candidates))
    if found is None:
        raise _no_division(config, num_layers)
    cuts = ",".join(profile[stage.first_layer].name for stage in found.stages[1:])
    table = configured_table(config, found.costs.replicas)
    return Division(table, cuts, profile, _advice(config, cluster, profile, bandwidth, found))


def has_replicas(config: ConfigDict) -> bool:
    """Return whether the stages of the schedule can have replicas."""
    return config.pipeline.schedule in {*WITH_REPLICAS, *CONTINUOUS, AUTO_SCHEDULE}


def _bandwidth(config: ConfigDict, cluster: Cluster) -> float:
    """Return the bandwidth between two stages."""
    if STAGE in cluster.links:
        return cluster.links[STAGE].bandwidth
    bandwidth: float = config.pipeline.bandwidth
    if not 1 <= bandwidth < math.inf:
        raise UserError(
            f"config.pipeline.bandwidth is {bandwidth}; it must be the bandwidth between two devices in bytes per "
            f"second, such as 1.25e9, with config.pipeline.partition={AUTO!r}"
        )
    return bandwidth


def _check_sizes(config: ConfigDict, table: Table, num_layers: int) -> None:
    """Raise UserError for numbers of stages that cannot be searched, or that the layers are too few for."""
    number, stage = table.num_stages, config.mesh.stage
    if number < 2:
        raise UserError(f"config.mesh.stage is {stage}; it must be at least 2 with config.pipeline.partition={AUTO!r}")
    if number > (most := most_workers(num_layers)):
        raise UserError(
            f"config.mesh.stage is {stage}, with {format_count(number, 'stage')}; there must be at most {most} for "
            f"{num_layers} layers, because the search would take too long"
        )
    if number > num_layers and not has_replicas(config):
        raise UserError(
            f"config.mesh.stage is {stage}, with {number} stages; there must be at most {num_layers}, the number of "
            f"layers, with config.pipeline.schedule={config.pipeline.schedule!r}"
        )


def _candidates(
    config: ConfigDict, cluster: Cluster, table: Table, profile: Sequence[LayerProfile], num_layers: float
) -> Iterator[EngineCosts]:
    """Yield the costs of all replicas with which config.pipeline can run.

    Args:
      config: the config of the run.
      cluster: the cluster.
      table: the table of the schedule if all stages have one device.
      profile: the layers of the profile; empty if not known.
      num_layers: number of layers of the model.
    """
    c, moments = config.pipeline, optimizer_moments(config)
    num_devices = config.mesh.stage
    forward, backward = sum(layer.forward_s for layer in profile), sum(layer.backward_s for layer in profile)
    ratio = backward / forward if forward else 2.0
    most_stages = min(num_devices, num_layers)
    if not has_replicas(config):
        yield flushing_costs(table, ratio, moments)
    elif c.schedule not in CONTINUOUS:
        name = UNTIL_CHOSEN if c.schedule == AUTO_SCHEDULE else c.schedule
        yield from flushing_candidates(name, num_devices, table.num_microbatches, most_stages, ratio, moments)
    else:
        num_data = sizes(config, cluster)[DATA]
        of_replica = max(config.batch_size // num_data, 1)

        def accepts(m: int) -> bool:
            if c.num_microbatches:  # other checks refuse a number that is not possible
                return True
            return of_replica % m == 0 and not is_refused(check_evaluation, config, num_data, m)

        yield from continuous_candidates(
            c.schedule, num_devices, c.num_microbatches, most_stages, of_replica, accepts, moments
        )


def optimizer_moments(config: ConfigDict) -> float:
    """Return the bytes of the optimizer state of a large matrix / the bytes of the matrix."""
    like = {"layer": {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}}
    return nbytes(jax.eval_shape(make_optimizer(config, lambda _step: 0.0).init, like)) / nbytes(like)


def _without_cuts_of_ties(
    config: ConfigDict, profile: Sequence[LayerProfile], model: Model | None
) -> list[LayerProfile]:
    """Return the profile, without the cuts between layers that share an array if these must be on one stage."""
    layers = list(profile)
    if model is None or config.pipeline.schedule not in CONTINUOUS:
        return layers
    numbers = {layer.name: number for number, layer in enumerate(layers)}
    for tie in model.ties:
        first, last = sorted((numbers[tie.layer], numbers[tie.source]))
        layers[first:last] = [layer._replace(can_cut=False) for layer in layers[first:last]]
    return layers


def _advice(
    config: ConfigDict, cluster: Cluster, profile: Sequence[LayerProfile], bandwidth: float, found: EnginePlan
) -> str:
    """Return advice to use data parallelism if it is faster by the profile, with an exchange after the backward."""
    number = config.mesh.stage
    compute = found.costs.num_microbatches / number * sum(layer.forward_s + layer.backward_s for layer in profile)
    weights = np.array(sum(layer.weight_bytes for layer in profile))
    seconds = compute + float(sync_seconds("ring", weights, number, bandwidth))
    if config.batch_size % math.prod(sizes(config, cluster).values()) or seconds >= found.seconds:
        return ""
    return (
        f"by the profile, config.strategy='data_parallel' on these {number} devices would take "
        f"{seconds / found.seconds:.0%} of the time of the pipeline"
    )


def _no_replicas(config: ConfigDict, num_layers: int) -> UserError:
    """Return the error for sizes for which no replicas are possible."""
    c = config.pipeline
    key = "pipeline.num_microbatches" if c.num_microbatches else "batch_size"
    return UserError(
        f"config.mesh.stage is {config.mesh.stage}; it must be at most {num_layers}, the number of layers, because "
        f"config.{key}={config.pipeline.num_microbatches or config.batch_size} cannot be shared by the replicas of "
        f"fewer stages with config.pipeline.schedule={c.schedule!r}"
    )


def _no_division(config: ConfigDict, num_layers: int) -> UserError:
    """Return the error for a profile that cannot be divided at all, or not within the memory limit."""
    c = config.pipeline
    if c.memory_limit:
        return UserError(
            f"config.pipeline.memory_limit is {c.memory_limit:g}; it must be larger, because no division of the "
            f"{format_count(num_layers, 'layer')} fits"
        )
    return UserError(
        f"config.mesh.stage is {config.mesh.stage}; it must be smaller, because the {num_layers} layers of the model "
        f"can be cut at too few places with config.pipeline.schedule={c.schedule!r}"
    )


def _check_layers(config: ConfigDict, profile: Sequence[LayerProfile], model: Model) -> None:
    """Raise UserError for a profile whose layers are not those of the model."""
    listed, names = [layer.name for layer in profile], [layer.name for layer in model.layers]
    for number, (stated, name) in enumerate(itertools.zip_longest(listed, names, fillvalue="missing")):
        if stated != name:
            raise UserError(
                f"config.pipeline.profile is {config.pipeline.profile!r}, whose layer {number} is {stated}; it must be "
                f"{name}, as in this model"
            )


def check_division(config: ConfigDict, division: Division, model: Model, inputs: Sequence[Any]) -> None:
    """Raise UserError for the profile of another model, and a division that is not known.

    inputs: shapes of the inputs of every layer: model.inputs(batch).
    """
    if division.needs_profile:
        raise UserError(
            f"config.pipeline.profile is ''; it must be the path of a profile, which `jaxpar partition profile` "
            f"writes, for a plan with config.pipeline.partition={AUTO!r}; only the start of a run measures the layers "
            "itself"
        )
    if division.profile:
        _check_layers(config, division.profile, model)
    _check_layer_sizes(config, division.profile, model, inputs)


def _check_layer_sizes(
    config: ConfigDict, profile: Sequence[LayerProfile], model: Model, inputs: Sequence[Any]
) -> None:
    """Raise UserError for a profile with other sizes than the model. A size of 0 is accepted as not stated.

    The profile can be of another number of examples, so outputs are compared in proportion to the first one.
    """
    where, scale = f"config.pipeline.profile is {config.pipeline.profile!r}, whose", 0.0
    for layer, of_model, after in zip(profile, model.layers, [*inputs[1:], None], strict=False):
        weights, output = nbytes(of_model.shapes), nbytes(after)
        if layer.weight_bytes and not math.isclose(layer.weight_bytes, weights, rel_tol=EQUAL):
            raise UserError(
                f"{where} layer {layer.name} has {layer.weight_bytes:.10g} bytes of weights; it must have {weights}, "
                "as in this model, or 0 if they are not known"
            )
        if not layer.output_bytes or not output:
            continue
        scale = scale or layer.output_bytes / output
        if not math.isclose(layer.output_bytes, scale * output, rel_tol=EQUAL):
            raise UserError(
                f"{where} layer {layer.name} has {layer.output_bytes:.10g} bytes of output; it must have "
                f"{scale * output:.10g}, in proportion to those of the first layers, or 0 if they are not known"
            )
