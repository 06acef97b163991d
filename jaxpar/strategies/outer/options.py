"""Checks config.outer, and plans the outer step: its fragments, its messages and its memory."""

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core.mesh import DATA
from jaxpar.core.plan import COPY, ON_HOST, Plan, Traffic
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, check_choice, format_bytes, format_count
from jaxpar.exchange.compress import Compressor, absmax_int8, error_feedback, topk
from jaxpar.layout import PER_REPLICA
from jaxpar.strategies.ray_cluster import WITHOUT_RAY, check_address

OUTER_POLICIES = {"diloco": "DiLoCo", "local_sgd": "local SGD"}
COMPRESSIONS = ("none", "int8", "topk")
DIFFERENCE_BLOCK = 4096  # elements that share a scale with int8
MOST_WORKERS = 1000
EXACT = Compressor(
    lambda _length, _key, _sender: (), lambda x, state: ((x,), state), lambda payload, _length: payload[0]
)


class OuterSettings(NamedTuple):
    """The settings of an outer step that all workers must share."""

    num_workers: int  # number of places
    min_workers: int  # number of workers for which the first round waits
    every_steps: int  # steps of a worker between two contributions of a fragment
    num_steps: int  # steps of each worker
    lr: float  # learning rate of the outer step
    momentum: float  # its Nesterov momentum
    compression: str  # one of COMPRESSIONS
    ratio: float  # fraction of the elements that topk sends
    overlap_steps: int  # steps between sending a difference and receiving the anchor
    mix: float  # share of the local parameters when they are mixed with an anchor that arrives after overlap_steps
    silence_seconds: float  # seconds without a message after which a worker is silent
    seed: int  # seed of the run
    lengths: tuple[int, ...]  # elements of each fragment

    @property
    def compressor(self) -> Compressor:
        """Compressor of differences, with error feedback if it is lossy."""
        if self.compression == "none":
            return EXACT
        return error_feedback(absmax_int8(DIFFERENCE_BLOCK) if self.compression == "int8" else topk(self.ratio))

    @property
    def message_bytes(self) -> list[int]:
        """Bytes of the message with the difference of each fragment."""
        return [self.compressor.nbytes(length) for length in self.lengths]

    def received_at(self, step: int) -> int:
        """Return the step after which a worker waits for the answer to what it sent after `step` steps."""
        return min(step + self.overlap_steps, self.num_steps)

    def due(self, step: int) -> Sequence[int]:
        """Return the fragments that a worker sends after its first `step` steps: they take turns, until the end."""
        if step == self.num_steps:
            return range(len(self.lengths))
        turn, rest = divmod(step, self.every_steps // len(self.lengths))
        return () if rest else ((turn - 1) % len(self.lengths),)


class OuterDetails(NamedTuple):
    """The details of a plan with an outer step."""

    settings: OuterSettings  # the settings that all workers share
    worker: int  # place of this run
    fragments: tuple[tuple[str, ...], ...]  # names of the layers of each fragment
    address: str  # address of the Ray cluster
    name: str  # Ray's namespace


def check_outer(config: ConfigDict, cluster: Cluster) -> None:
    """Raise UserError for an invalid config.outer, or a run that cannot be a worker."""
    o, key = config.outer, f"config.outer.num_workers={config.outer.num_workers}"
    if not 0 <= o.num_workers <= MOST_WORKERS:
        raise UserError(f"config.outer.num_workers is {o.num_workers}; it must be between 0 and {MOST_WORKERS}")
    if not o.num_workers:
        return
    check_choice("outer.policy", o.policy, OUTER_POLICIES)
    check_choice("outer.compression", o.compression, COMPRESSIONS)
    last, gap = o.num_workers - 1, o.every_steps // max(o.fragments, 1)
    are_equal = o.fragments >= 1 and o.every_steps % o.fragments == 0  # the steps between fragments
    is_multiple = config.num_steps > 0 and config.num_steps % max(o.every_steps, 1) == 0
    is_synchronous = config.strategy not in ("async_data_parallel", "swarm")
    rules: list[configs.KeyRule] = [
        ("outer.worker", 0 <= o.worker <= last, f"between 0 and {last} with {key}"),
        ("outer.min_workers", 0 <= o.min_workers <= o.num_workers, f"between 0 and {o.num_workers} with {key}"),
        ("outer.every_steps", o.every_steps >= 1, "at least 1"),
        ("outer.lr", 0 < o.lr < math.inf, "finite and greater than 0"),
        ("outer.momentum", 0 <= o.momentum < 1, "at least 0 and less than 1"),
        ("outer.ratio", 0 < o.ratio <= 1, "greater than 0 and at most 1"),
        ("outer.fragments", are_equal, f"a divisor of {o.every_steps} (config.outer.every_steps)"),
        (
            "outer.overlap_steps",
            0 <= o.overlap_steps < gap,
            f"at least 0 and less than {gap}, the steps between two fragments (config.outer.every_steps / fragments)",
        ),
        ("outer.mix", 0 <= o.mix <= 1, "between 0 and 1"),
        ("outer.silence_seconds", 1 <= o.silence_seconds < math.inf, "finite and at least 1"),
        (
            "watchdog_seconds",
            not config.watchdog_seconds or config.watchdog_seconds > o.silence_seconds,
            f"0 or more than {o.silence_seconds} (config.outer.silence_seconds), for which the others are waited for",
        ),
        ("outer.name", bool(o.name), "the name of the run on the Ray cluster"),
        ("num_steps", is_multiple, f"a positive multiple of {o.every_steps} (config.outer.every_steps) with {key}"),
        ("elastic_seconds", config.elastic_seconds == 0, f"0 with {key}, whose workers are single processes"),
        ("strategy", is_synchronous, f"a synchronous strategy with {key}, such as 'data_parallel'"),
    ]
    configs.check_rules(config, rules)
    check_address("outer.address", o.address, required=True)
    meshes.check_processes(key, cluster)
    configs.check_rules(config, [("outer.num_workers", find_spec("ray") is not None, f"0 {WITHOUT_RAY}")])


def with_outer_step(config: ConfigDict, shapes: Problem, plan: Plan[Any]) -> Plan[Any]:
    """Return the plan of a run as that of a worker of an outer step.

    Raises UserError if the run has no single set of parameters between two steps, or there are more fragments than
    layers.
    """
    o = config.outer
    replicas = any(leaf.kind == PER_REPLICA for leaf in plan.layouts["params"].flat)
    if replicas or plan.delays is not None:
        key, value = ("exchange", config.exchange) if replicas else ("pipeline.schedule", config.pipeline.schedule)
        reason = "all replicas have the same parameters" if replicas else "no update is delayed"
        raise UserError(f"config.{key} is {value!r}; it must be one with which {reason}, with config.outer.num_workers")
    params = abstract_params(shapes)
    most = f"at most {len(params)}, the number of layers with parameters ({', '.join(params)})"
    configs.check_rules(config, [("outer.fragments", o.fragments <= len(params), most)])
    fragments = tuple(tuple(list(params)[number :: o.fragments]) for number in range(o.fragments))
    sizes = {layer: sum(leaf.size for leaf in jax.tree.leaves(arrays)) for layer, arrays in params.items()}
    is_plain = o.policy == "local_sgd"
    same = ("num_workers", "every_steps", "compression", "ratio", "overlap_steps", "mix", "silence_seconds")
    settings = OuterSettings(
        **{name: o[name] for name in same},
        min_workers=o.min_workers or o.num_workers,
        num_steps=shapes.num_steps,
        lr=1.0 if is_plain else o.lr,
        momentum=0.0 if is_plain else o.momentum,
        seed=config.seed,
        lengths=tuple(sum(sizes[layer] for layer in layers) for layers in fragments),
    )
    total, sent = 4 * sum(sizes.values()), sum(settings.message_bytes)
    held = {"anchors": total, "residuals": 0 if o.compression == "none" else total}
    if o.worker == 0:
        held["outer server"] = 2 * total + o.num_workers * (total + 2 * sent)  # see outer/server.py
    on_host = {f"{part}{ON_HOST}": nbytes for part, nbytes in held.items() if nbytes}
    [first, *others] = plan.memory
    dtype = {"int8": "int8"}.get(o.compression, "float32")
    traffic = Traffic(COPY, dtype, DATA, sent / o.every_steps, o.fragments / o.every_steps)
    kept = {name: getattr(settings, name) for name in ("lr", "momentum", "compression", "num_workers")}
    how = f"{OUTER_POLICIES[o.policy]} with {format_count(o.num_workers, 'worker')}"
    return replace(
        plan,
        summary=f"{plan.summary}; worker {o.worker} of {how}: sends {format_bytes(sent)} and receives "
        f"{format_bytes(total)} every {format_count(o.every_steps, 'step')}",
        memory=[{**first, **on_host}, *others],
        traffic=(*plan.traffic, traffic),
        private_key={**plan.private_key, "outer": {**kept, "fragments": o.fragments, "every_steps": o.every_steps}},
        differs="; ".join(filter(None, [plan.differs, f"workers of {OUTER_POLICIES[o.policy]} train on their own"])),
        outer=OuterDetails(settings, o.worker, fragments, o.address, o.name),
    )


def abstract_params(problem: Problem) -> dict[str, Any]:
    """Return the shapes of the canonical parameters by layer, in order, without layers that have none."""
    like = states.to_canonical(states.abstract_state(problem.model, problem.optimizer))["params"]
    layers = (layer.name for layer in problem.model.layers)
    return {layer: like[layer] for layer in layers if jax.tree.leaves(like.get(layer))}
