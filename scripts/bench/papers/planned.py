"""Predicts published rates of training language models with the planner, on GPUs that this machine does not have.

A row has the layers, GPUs, texts of a microbatch, microbatches and rematerialization of the run that it names. The
programs differ, so what is compared is jaxpar's step with that of another program. Nothing is compiled.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.choose import planner
from jaxpar.choose.candidates import Candidate, Space
from jaxpar.choose.costs.machine import GpuMachine
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.cluster import Cluster
from jaxpar.cluster.files import find_named
from jaxpar.core.step import Problem
from jaxpar.data import DataInfo
from scripts.bench.vocabulary import DEFAULTS, make_problem, problem_of

FACTS = {"name", "published", "ours", "group", "same_tensor", "to"}  # keys of a row that no prediction depends on


class Planned(NamedTuple):
    """A predicted step: its candidate, the texts of a step, and its seconds."""

    candidate: Candidate
    batch_size: int
    seconds: float


def values(table: Mapping[str, Any]) -> list[float]:
    """Return the predicted tokens/s of a GPU for each row of a table.

    If the table is `relative`: divided by that of the row with the name `to`.
    """
    known: dict[str, float] = {}  # by what is predicted: measured runs of the same configuration have several rows
    rates = {}
    for row in table["rows"]:
        case = json.dumps({key: row[key] for key in sorted(set(row) - FACTS)})
        if case not in known:
            known[case] = predicted_rate(row, table["models"][row["model"]])
        rates[row["name"]] = known[case]
    if "relative" not in table:
        return list(rates.values())
    return [rates[row["name"]] / rates[row["to"]] for row in table["rows"]]


def predicted_rate(row: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """Return the predicted tokens/s of a GPU."""
    planned = predict(row, model)
    return planned.batch_size * model["tokens"] / planned.seconds / row_cluster(row).num_devices


def row_cluster(row: Mapping[str, Any]) -> Cluster:
    """Return the GPUs of a row, with its `network`, the bytes/s of a GPU to other hosts, `cards` and `memory`."""
    cluster = find_named(row["cluster"], "cluster")[1]
    network = row.get("network", cluster.send_rates["network"])
    rates = {**cluster.send_rates, "network": network}
    memory = row.get("memory", cluster.memory_bytes)
    return replace(cluster, send_rates=rates, network_cards=row.get("cards"), memory_bytes=memory)


def predict(row: Mapping[str, Any], model: Mapping[str, Any]) -> Planned:
    """Predict the step of a row.

    row: its `cluster`; `size`, the texts of a microbatch; `microbatches` of a replica; `remat`; if they differ from
    FSDP's, other keys of the `config`; `cuts`, the blocks of a stage, with embedding and head of `cuts_ends` blocks
    each; and `gathers` of a layer in a step, if computing waits for them and for all reductions. model: the features,
    heads, layers, tokens of a text, words, and other keys of the config.
    """
    config, cluster, problem = problem_of_row(row, model)
    assert cluster.memory_bytes is not None
    layers_of = TracedLayers(problem._replace(accumulation_steps=1), cluster)
    space = Space(config, problem, layers_of, GpuMachine(cluster), cluster.memory_bytes)
    plan = strategies.plan(config, problem, cluster)
    found = planner.candidate_of_plan(space, config, plan)
    seconds = found.costs.seconds
    if row.get("gathers"):
        times = {"all-gather": row["gathers"] / 2}  # relative to those of jaxpar
        sent = sum(times.get(one.kind, 1.0) * space.machine.collective(one, plan.axes) for one in plan.traffic)
        seconds = found.costs.compute + sent + found.costs.update
    return Planned(found, config.batch_size, seconds)


def problem_of_row(row: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[ConfigDict, Cluster, Problem]:
    """Return the config of a row, its GPUs and its problem. row and model: see `predict`."""
    cluster, config = row_cluster(row), configs.default_config()
    others = row.get("config", {"exchange": "zero3"})
    num_stages = others.get("mesh.stage", 1)
    replicas = cluster.num_devices // (others.get("mesh.tensor", 1) * num_stages)
    of_step = {"model.remat": row["remat"], "optimizer.accumulation_steps": row["microbatches"]}
    if num_stages > 1:
        of_step = {"pipeline.remat": row["remat"], "pipeline.num_microbatches": row["microbatches"]}
        of_step |= {"strategy": "pipeline", "pipeline.schedule": "1f1b", "pipeline.executor": "dispatch"}
    if "cuts" in row:
        firsts = range(row["cuts"] - row["cuts_ends"], model["layers"], row["cuts"])
        of_step["pipeline.partition"] = ",".join(f"block_{first}" for first in firsts)
    config.update_from_flattened_dict(
        {key: value for key, value in DEFAULTS.items() if key != "model.max_length"}
        | {
            "model.hidden_size": model["features"],
            "model.num_heads": row.get("heads", model["heads"]),
            "model.num_layers": model["layers"],
            "mesh.data": replicas,
            "batch_size": replicas * row["size"] * row["microbatches"],
        }
        | of_step
        | dict(model.get("config", {"model.max_length": model["tokens"]}))
        | dict(others)
    )
    make = make_problem if config.task == "causal_lm" else _classification
    return config, cluster, make(config, cluster, words=model["words"], length=model["tokens"])


def _classification(config: Any, cluster: Cluster, *, words: int, length: int) -> Problem:
    """Return the problem of classifying texts of one length."""
    info = DataInfo("text", (length,), num_classes=2, class_names=("a", "b"), vocab_size=words, pad_id=0)
    size = config.batch_size
    batch = {
        "inputs": jax.ShapeDtypeStruct((size, length), np.int32),
        "labels": jax.ShapeDtypeStruct((size,), np.int32),
        "weights": jax.ShapeDtypeStruct((size,), np.float32),
        "index": jax.ShapeDtypeStruct((size,), np.int32),
    }
    return problem_of(config, info, cluster, batch)
