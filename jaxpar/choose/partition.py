"""Chooses the cut points and replicas of the stages of a pipeline by a profile of the layers."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxpar.choose.candidates import Settings, with_values
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.partition_search import (
    Partition,
    PartitionSearch,
    TableCosts,
    continuous_candidates,
    flushing_candidates,
    flushing_costs,
)
from jaxpar.choose.pipedream import most_workers
from jaxpar.cluster import Cluster
from jaxpar.core.mesh import DATA, STAGE, sizes
from jaxpar.core.optimizer import make_optimizer
from jaxpar.core.ring import sent_of_operand
from jaxpar.core.state import nbytes
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, format_count, is_refused
from jaxpar.models.model import Model
from jaxpar.strategies.pipeline.executor.partition import AUTO
from jaxpar.strategies.pipeline.schedules import DISPATCH, check_evaluation, check_pipeline_values, configured_table
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.schedule import WITH_REPLICAS

UNTIL_CHOSEN = "1f1b"  # the schedule that stands for `auto` until the stages are known
EQUAL = 0.01  # largest relative difference between a size in a profile and that of the model, for rounded numbers
UNKNOWN_LAYERS = 700  # number of layers to assume while the model is not known
UNSET = {"profile": "", "bandwidth": 0.0, "memory_limit": 0.0}  # keys that only partition auto reads


class StageChoice(NamedTuple):
    """The settings that were chosen, why, and advice that follows from a profile; empty if there is none."""

    settings: Settings
    reasons: tuple[str, ...]
    advice: str = ""


def choose_partition(
    config: ConfigDict, problem: Problem, cluster: Cluster, profile: Sequence[LayerProfile]
) -> StageChoice:
    """Return the cut points and replicas whose step is shortest by the profile, and advice if pipelines are slow.

    Raises UserError if there is no profile, it is that of another model, or nothing fits.
    """
    c, model = config.pipeline, problem.model
    if not profile:
        raise UserError(
            f"config.pipeline.profile is ''; it must be the path of a profile, which `jaxpar partition profile` "
            f"writes, for a plan with config.pipeline.partition={AUTO!r}; only the start of a run measures the layers "
            "itself"
        )
    _check_layers(config, profile, model)
    layers, numbers = list(profile), {layer.name: number for number, layer in enumerate(profile)}
    for tie in model.ties if c.schedule in CONTINUOUS else ():  # layers that share an array must be on one stage
        first, last = sorted((numbers[tie.layer], numbers[tie.source]))
        layers[first:last] = [layer._replace(can_cut=False) for layer in layers[first:last]]
    bandwidth = _bandwidth(config, cluster)
    search = PartitionSearch(layers, bandwidth=bandwidth, memory_limit=c.memory_limit or math.inf)
    found = search.find(divisions(config, cluster, len(profile), profile))
    if found is None and c.memory_limit:
        raise UserError(
            f"config.pipeline.memory_limit is {c.memory_limit:g}; it must be larger, because no division of the "
            f"{format_count(len(layers), 'layer')} fits"
        )
    if found is None:
        raise UserError(
            f"config.mesh.stage is {config.mesh.stage}; it must be smaller, because the {len(layers)} layers of the "
            f"model can be cut at too few places with config.pipeline.schedule={c.schedule!r}"
        )
    _check_layer_sizes(config, profile, model, model.inputs(problem.batch))
    settings = {
        "pipeline.partition": ",".join(profile[stage.first_layer].name for stage in found.stages[1:]),
        "pipeline.replicas": replicas_text(found.costs.replicas),
    }
    reason = f"{len(found.stages)} stages: the division of the layers whose step is shortest by the profile"
    return StageChoice(settings, (reason,), _advice(config, cluster, profile, bandwidth, found))


def replicas_text(replicas: Sequence[int]) -> str:
    """Return replicas as a value of config.pipeline.replicas."""
    return ",".join(map(str, replicas)) if max(replicas) > 1 else ""


def assumed_executor(config: ConfigDict) -> str:
    """Return the executor of the config, or dispatch while it is still to be chosen."""
    executor: str = config.pipeline.executor
    return DISPATCH if executor == AUTO else executor


def check_unset(config: ConfigDict) -> None:
    """Raise UserError if a pipeline sets a key that only partition auto reads, without it."""
    c = config.pipeline
    for key, unset in UNSET.items() if c.partition != AUTO and config.strategy == "pipeline" else ():
        of_schedule = f" or config.pipeline.schedule={AUTO!r}" if key == "memory_limit" else ""
        if c[key] != unset and not (of_schedule and c.schedule == AUTO):
            raise UserError(
                f"config.pipeline.{key} is {c[key]!r}; it must be {unset!r} without "
                f"config.pipeline.partition={AUTO!r}{of_schedule}"
            )


def _bandwidth(config: ConfigDict, cluster: Cluster) -> float:
    if STAGE in cluster.links:
        return cluster.links[STAGE].bandwidth
    bandwidth: float = config.pipeline.bandwidth
    if not 1 <= bandwidth < math.inf:
        raise UserError(
            f"config.pipeline.bandwidth is {bandwidth}; it must be the bandwidth between two devices in bytes per "
            f"second, such as 1.25e9, with config.pipeline.partition={AUTO!r}"
        )
    return bandwidth


def divisions(
    config: ConfigDict, cluster: Cluster, num_layers: int, profile: Sequence[LayerProfile]
) -> Iterator[TableCosts]:
    """Yield the costs of all replicas with which config.pipeline can run. Raises UserError if there are none.

    profile: empty if the times are not known yet.
    """
    c, number = config.pipeline, config.mesh.stage
    check_pipeline_values(config)
    if c.replicas:
        raise UserError(
            f"config.pipeline.replicas is {c.replicas!r}; it must be empty with config.pipeline.partition={AUTO!r}, "
            "which chooses them"
        )
    _bandwidth(config, cluster)
    name = UNTIL_CHOSEN if c.schedule == AUTO else c.schedule
    has_replicas = name in {*WITH_REPLICAS, *CONTINUOUS}
    table = configured_table(with_values(config, {"pipeline.schedule": name}), ())
    if table.num_stages < 2:
        raise UserError(f"config.mesh.stage is {number}; it must be at least 2 with config.pipeline.partition={AUTO!r}")
    if table.num_stages > (most := most_workers(num_layers)):
        raise UserError(
            f"config.mesh.stage is {number}, with {format_count(table.num_stages, 'stage')}; there must be at most "
            f"{most} for {num_layers} layers, because the search would take too long"
        )
    if table.num_stages > num_layers and not has_replicas:
        raise UserError(
            f"config.mesh.stage is {number}, with {table.num_stages} stages; there must be at most {num_layers}, the "
            f"number of layers, with config.pipeline.schedule={c.schedule!r}"
        )
    forward, backward = sum(layer.forward_s for layer in profile), sum(layer.backward_s for layer in profile)
    ratio, moments = backward / forward if forward else 2.0, optimizer_moments(config)
    most_stages, executor = min(number, num_layers), assumed_executor(config)
    found: Iterator[TableCosts] = iter(())
    if not has_replicas:
        found = iter([flushing_costs(table, ratio, moments, executor)])
    elif name not in CONTINUOUS:
        found = flushing_candidates(name, number, table.num_microbatches, most_stages, ratio, moments, executor)
    else:
        num_data = sizes(config, cluster)[DATA]
        of_replica = max(config.batch_size // num_data, 1)

        def accepts(m: int) -> bool:
            if c.num_microbatches:  # other checks refuse a number that is not possible
                return True
            return of_replica % m == 0 and not is_refused(check_evaluation, config, num_data, m)

        found = continuous_candidates(name, number, c.num_microbatches, most_stages, of_replica, accepts, moments)
    first = next(found, None)
    if first is None:
        key = "pipeline.num_microbatches" if c.num_microbatches else "batch_size"
        raise UserError(
            f"config.mesh.stage is {number}; it must be at most {num_layers}, the number of layers, because "
            f"config.{key}={c.num_microbatches or config.batch_size} cannot be shared by the replicas of fewer stages "
            f"with config.pipeline.schedule={c.schedule!r}"
        )
    yield first
    yield from found


def optimizer_moments(config: ConfigDict) -> float:
    """Return the bytes of the optimizer state of a large matrix / the bytes of the matrix."""
    like = {"layer": {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}}
    return nbytes(jax.eval_shape(make_optimizer(config, lambda _step: 0.0).init, like)) / nbytes(like)


def _advice(
    config: ConfigDict, cluster: Cluster, profile: Sequence[LayerProfile], bandwidth: float, found: Partition
) -> str:
    """Return advice to use data parallelism if it is faster by the profile, with an exchange after the backward."""
    number = config.mesh.stage
    compute = found.costs.num_microbatches / number * sum(layer.forward_s + layer.backward_s for layer in profile)
    sent = sent_of_operand("all-reduce", number) * sum(layer.weight_bytes for layer in profile)
    seconds = compute + sent / bandwidth
    if config.batch_size % math.prod(sizes(config, cluster).values()) or seconds >= found.seconds:
        return ""
    return (
        f"by the profile, config.strategy='data_parallel' on these {number} devices would take "
        f"{seconds / found.seconds:.0%} of the time of the pipeline"
    )


def _check_layers(config: ConfigDict, profile: Sequence[LayerProfile], model: Model) -> None:
    names = [layer.name for layer in profile], [layer.name for layer in model.layers]
    for number in range(max(map(len, names))):
        stated, name = (of[number] if number < len(of) else "missing" for of in names)
        if stated != name:
            raise UserError(
                f"config.pipeline.profile is {config.pipeline.profile!r}, whose layer {number} is {stated}; it must be "
                f"{name}, as in this model"
            )


def _check_layer_sizes(
    config: ConfigDict, profile: Sequence[LayerProfile], model: Model, inputs: Sequence[Any]
) -> None:
    """Raise UserError for a profile with other sizes than the model. A size of 0 is accepted as not stated.

    The profile can be of another number of examples, so outputs are compared in proportion to the first one.
    """
    where, scale = f"config.pipeline.profile is {config.pipeline.profile!r}, whose", 0.0
    for layer, of_model, after in zip(profile, model.layers, [*inputs[1:], None], strict=True):
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
