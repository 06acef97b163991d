"""Checks config.asynchronous, and builds its table of updates and its mitigations. Files that it names are read once.

`decide_updates` checks everything that needs neither data nor shapes, and reads the files. `build_table` and
`build_mitigations` also need the number of steps and the optimizer.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import optax
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.core import optimizer
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, check_choice
from jaxpar.strategies.asynchronous import delays, mitigations, table
from jaxpar.strategies.asynchronous.delays import Delays
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.simulate import POLICIES, simulate, simulation_obstacle
from jaxpar.strategies.asynchronous.table import UpdateTable

# By policy: its settings and their defaults. Other policies do not have these settings. The interval of diloco depends
# on the length of the run: see `diloco_interval`.
POLICY_SETTINGS: dict[str, dict[str, Any]] = {
    "ssp": {"bound": 3},
    "softsync": {"groups": 2},
    "local_sgd": {"interval": 8},
    "diloco": {"interval": None, "outer_lr": 0.7, "outer_momentum": 0.9},
    "model_average": {"interval": 8},
}
MODES = ("emulated", "live")
LIVE_POLICIES = ("async", "ssp")
DEFAULT_MITIGATIONS = {"async": "staleness_aware", "ssp": "staleness_aware"}  # by policy
LOCAL_POLICIES = ("local_sgd", "diloco", "model_average")  # their workers have local weights
MITIGATIONS = ("dc_asgd", "adaptive_dc_asgd", "clip_by_staleness", "staleness_aware", "corrected_momentum")
DILOCO_STEPS, DILOCO_ROUNDS = 500, 100  # of a round, and of a run (Douillard et al., 2023: 500 and 128)
FEW_ROUNDS_MOMENTUM = 0.8  # more outer momentum than this needs about DILOCO_ROUNDS rounds
STRENGTHS = {"dc_asgd": 0.04, "adaptive_dc_asgd": 2.0}  # Zheng et al., 2017, section 6.1


class UpdateSource(NamedTuple):
    """The source of a run's table. Its files have been read."""

    delays: Delays  # the delays to simulate
    # the table of a live run, to be replayed; None: the table is simulated, or made by the run
    recorded: UpdateTable | None


def decide_updates(config: ConfigDict) -> UpdateSource:
    """Read the files that config.asynchronous names. Raises UserError for an invalid setting or file."""
    a = config.asynchronous
    check_choice("asynchronous.mode", a.mode, MODES)
    check_choice("asynchronous.policy", a.policy, POLICIES)
    configs.check_rules(config, _rules(a))
    _check_mitigations(config)
    times = _read_delays(config)
    recorded = _read_recorded(config) if a.table else None
    if recorded is None and (reason := simulation_obstacle(a.policy, _simulation_settings(config, 1))):
        raise UserError(f"config.asynchronous.{reason}")
    return UpdateSource(times, recorded)


def _rules(a: ConfigDict) -> Iterator[configs.KeyRule]:
    """Yield the rules of the policy and the mode. a: config.asynchronous."""
    for key in sorted({key for settings in POLICY_SETTINGS.values() for key in settings}):
        is_used = key in POLICY_SETTINGS.get(a.policy, {})
        yield f"asynchronous.{key}", a[key] is None or is_used, f"None with policy {a.policy!r}"
    yield "asynchronous.outer_lr", a.outer_lr is None or 0 <= a.outer_lr < math.inf, "finite and at least 0"
    momentum = a.outer_momentum
    yield "asynchronous.outer_momentum", momentum is None or 0 <= momentum < 1, "at least 0 and less than 1"
    can_be_live, choices = a.policy in LIVE_POLICIES, f"one of {', '.join(LIVE_POLICIES)}"
    if a.mode == "live":
        live = "config.asynchronous.mode='live'"
        yield "asynchronous.policy", can_be_live, f"{choices} with {live} (ssp with bound 0 is lockstep)"
        yield "asynchronous.table", not a.table, f"empty with {live}"
        yield from _rules_of_delays(a, f"{live}, which measures real times", but="slowdown")
    if a.table:
        replay = "config.asynchronous.table"
        yield "asynchronous.policy", can_be_live, f"{choices} with {replay}"
        yield "asynchronous.bound", a.bound is None, f"None with {replay}, which already fixes the order of updates"
        yield from _rules_of_delays(a, f"{replay}, which already contains times")


def _rules_of_delays(a: ConfigDict, why: str, but: str = "") -> Iterator[configs.KeyRule]:
    """Yield the rules of settings of delays that would have no effect. but: the one that has."""
    unset = {**Delays._field_defaults, "trace": ""}
    for key, value in a.delays.items():
        yield f"asynchronous.delays.{key}", key == but or value == unset[key], f"{unset[key]!r} with {why}"


def _check_mitigations(config: ConfigDict) -> None:
    a, o, names = config.asynchronous, config.optimizer, named_mitigations(config)
    key, are = "config.asynchronous.mitigations", f"config.asynchronous.mitigations is {a.mitigations!r}"
    if a.mitigations and "" in map(str.strip, a.mitigations.split(",")):
        raise UserError(f"{are}; it must be names separated by commas, or empty")
    for name in names:
        check_choice("asynchronous.mitigations", name, MITIGATIONS)
    if names and a.policy in LOCAL_POLICIES:
        raise UserError(
            f"{are}; it must be empty with policy {a.policy!r}, whose workers apply gradients to the local weights "
            "that they were computed from"
        )
    if len(set(names)) < len(names):
        raise UserError(f"{are}; it must not repeat a name")
    if STRENGTHS.keys() <= set(names):
        raise UserError(f"{are}; it must contain at most one of {', '.join(STRENGTHS)}")
    if a.mode == "live" and "corrected_momentum" in names:
        raise UserError(
            f"{are}; it must not contain corrected_momentum with config.asynchronous.mode='live', because the "
            "staleness is not known before the run"
        )
    clips, compensates = "clip_by_staleness" in names, any(name in STRENGTHS for name in names)
    either = " or ".join(STRENGTHS)
    strength, norm = a.dc_strength, a.max_norm
    rules: list[configs.KeyRule] = [
        ("asynchronous.dc_strength", strength is None or 0 <= strength < math.inf, "finite and at least 0"),
        ("asynchronous.dc_strength", strength is None or compensates, f"None without {either} in {key}"),
        ("asynchronous.max_norm", norm is not None or not clips, "greater than 0 with clip_by_staleness"),
        ("asynchronous.max_norm", norm is None or clips, f"None without clip_by_staleness in {key}"),
        ("asynchronous.max_norm", norm is None or norm > 0, "greater than 0"),
    ]
    if "corrected_momentum" in names:
        where, momenta = f"with corrected_momentum in {key}", optimizer.OPTIMIZERS[o.name].momentum
        others = ", ".join(name for name, one in optimizer.OPTIMIZERS.items() if one.momentum)
        rules.append(("optimizer.name", bool(momenta), f"one of {others} {where}"))
        rules += [(f"optimizer.{name}", bool(o[name]), f"greater than 0 {where}") for name in momenta]
    configs.check_rules(config, rules)


def named_mitigations(config: ConfigDict) -> list[str]:
    """Return the names in config.asynchronous.mitigations, or the default of the policy if it is None."""
    a = config.asynchronous
    names = DEFAULT_MITIGATIONS.get(a.policy, "") if a.mitigations is None else a.mitigations
    return [name.strip() for name in names.split(",") if name.strip()]


def diloco_interval(num_steps: int) -> int:
    """Return the default interval of diloco: the paper's, or less so that the run has 100 rounds, but at least 8."""
    return max(8, min(DILOCO_STEPS, num_steps // DILOCO_ROUNDS))


def diloco_advice(config: ConfigDict, updates: UpdateTable | None) -> str:
    """Return advice against an outer momentum that is too high for the number of rounds, for `Plan.advice`."""
    if config.asynchronous.policy != "diloco" or updates is None or updates.num_updates >= DILOCO_ROUNDS:
        return ""
    momentum = policy_settings(config)["outer_momentum"]
    if momentum <= FEW_ROUNDS_MOMENTUM:
        return ""
    return (
        f"config.asynchronous.outer_momentum is {momentum}, which is too high for {updates.num_updates} rounds of "
        f"diloco; use 0.5 to 0.8 below {DILOCO_ROUNDS} rounds"
    )


def policy_settings(config: ConfigDict) -> dict[str, Any]:
    """Return the settings of the policy, with defaults for those that are None, except the interval of diloco."""
    a = config.asynchronous
    defaults = POLICY_SETTINGS.get(a.policy, {})
    settings = {key: default if a[key] is None else a[key] for key, default in defaults.items()}
    if a.policy == "softsync" and a.groups is None:
        settings["groups"] = min(settings["groups"], max(a.num_workers, 1))
    return settings


def build_table(config: ConfigDict, source: UpdateSource, num_steps: int) -> UpdateTable:
    """Return the table of an emulated run. Raises UserError for a recorded table whose run had another length."""
    a, recorded = config.asynchronous, source.recorded
    if recorded is None:
        settings = _simulation_settings(config, num_steps)
        simulated = simulate(a.policy, **settings, delays=source.delays, seed=config.seed)
        table.validate(simulated)
        return simulated
    steps = int(recorded.step[-1]) + 1
    if steps != num_steps or len(recorded.update) != steps * recorded.num_workers:
        raise UserError(
            f"config.asynchronous.table is {a.table!r}, which has {steps} steps and {len(recorded.update)} gradients; "
            f"it must have {num_steps} steps and {num_steps * a.num_workers} gradients, like this run"
        )
    return recorded


def _simulation_settings(config: ConfigDict, num_steps: int) -> dict[str, int]:
    """Return the arguments of `simulate` that the config sets: workers, gradients, and settings of the policy."""
    num_workers = config.asynchronous.num_workers
    sizes = {"num_workers": num_workers, "num_gradients": max(num_workers, 1) * num_steps}
    settings = {key: value for key, value in policy_settings(config).items() if key in ("bound", "groups", "interval")}
    if "interval" in settings and settings["interval"] is None:
        settings["interval"] = diloco_interval(num_steps)
    return sizes | settings


def _read_recorded(config: ConfigDict) -> UpdateTable:
    """Read the table of a live run."""
    a, named = config.asynchronous, f"config.asynchronous.table is {config.asynchronous.table!r}"
    recorded = table.read_updates(a.table, "config.asynchronous.table is ")
    recorded_number = f"{recorded.num_workers}, as in {a.table}"
    configs.check_rules(config, [("asynchronous.num_workers", a.num_workers == recorded.num_workers, recorded_number)])
    if recorded.step[0]:
        raise UserError(
            f"{named}, which begins at step {recorded.step[0]}, where its run switched to this strategy; it must begin "
            "at step 0"
        )
    chunks = np.arange(len(recorded.chunk))
    if (np.sort(recorded.chunk) != chunks).any() or (recorded.chunk // a.num_workers > recorded.step).any():
        raise UserError(f"{named}; it must contain every shard of every batch, and none before the step of its batch")
    if len(np.unique(recorded.step)) <= recorded.step[-1]:
        raise UserError(f"{named}; it must have a row for every step")
    return recorded


def _read_delays(config: ConfigDict) -> Delays:
    """Read config.asynchronous.delays, and the trace that it names."""
    d = config.asynchronous.delays
    path = "the path of a CSV file with config.asynchronous.delays.distribution='trace', and empty otherwise"
    is_needed = d.distribution == "trace"
    configs.check_rules(config, [("asynchronous.delays.trace", is_needed == bool(d.trace), path)])
    trace = delays.read_trace(d.trace, "config.asynchronous.delays.trace is ") if d.trace else ()
    times = Delays(**{**d, "trace": trace})
    if reason := delays.delays_obstacle(times):
        raise UserError(f"config.asynchronous.delays.{reason}")
    return times


def build_mitigations(config: ConfigDict, problem: Problem, updates: UpdateTable | None) -> tuple[Problem, Mitigations]:
    """Return the problem, with its optimizer replaced if a mitigation requires that, and the mitigations."""
    a, names = config.asynchronous, named_mitigations(config)
    weighted, scaled = mitigations.staleness_aware()
    made = {"staleness_aware": weighted, "clip_by_staleness": mitigations.clip_by_staleness(a.max_norm or 0.0)}
    for name, function in (("dc_asgd", mitigations.dc_asgd), ("adaptive_dc_asgd", mitigations.adaptive_dc_asgd)):
        made[name] = function(STRENGTHS[name] if a.dc_strength is None else a.dc_strength)
    of_gradients = optax.chain(optax.identity(), *(made[name] for name in names if name in made))
    of_updates = optax.chain(optax.identity(), scaled if "staleness_aware" in names else optax.identity())
    if "corrected_momentum" in names and updates is not None:
        learning_rate = optimizer.build_learning_rate(config, problem.num_steps)

        def with_momenta(**momenta: float) -> optax.GradientTransformationExtraArgs:
            copy = config.copy_and_resolve_references()
            copy.optimizer.update(momenta)
            return optimizer.make_optimizer(copy, learning_rate)

        momenta = {key: config.optimizer[key] for key in optimizer.OPTIMIZERS[config.optimizer.name].momentum}
        corrected = mitigations.corrected_momentum(with_momenta, momenta, float(updates.staleness.mean()))
        problem = problem._replace(optimizer=corrected)
    return problem, Mitigations(of_gradients, of_updates, needs_read=bool(set(names) & STRENGTHS.keys()))
