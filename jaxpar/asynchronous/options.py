"""config.asynchronous: checked, and made into a table of updates and mitigations."""

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import optax
from ml_collections import ConfigDict

from jaxpar import optimizer
from jaxpar.asynchronous import delays, mitigations, table
from jaxpar.asynchronous.delays import Delays
from jaxpar.asynchronous.programs import Mitigations
from jaxpar.asynchronous.simulate import POLICIES, simulate
from jaxpar.asynchronous.table import UpdateTable
from jaxpar.errors import UserError, check_choice
from jaxpar.step import Problem

# By policy: the settings that it has, and their defaults. No other policy has them.
POLICY_SETTINGS: dict[str, dict[str, Any]] = {
    "ssp": {"bound": 3},
    "softsync": {"groups": 2},
    "local_sgd": {"interval": 8},
    "diloco": {"interval": 8, "outer_lr": 0.7, "outer_momentum": 0.9},
    "model_average": {"interval": 8},
}
MODES, LIVE = ("emulated", "live"), ("async", "ssp")  # LIVE: policies that threads have
LOCAL = ("local_sgd", "diloco", "model_average")  # policies whose workers have weights of their own
MITIGATIONS = ("dc_asgd", "adaptive_dc_asgd", "clip_by_staleness", "staleness_aware", "corrected_momentum")
STRENGTHS = {"dc_asgd": 0.04, "adaptive_dc_asgd": 2.0}  # Zheng et al., 2017, section 6.1


def check(config: ConfigDict) -> None:
    """Raises UserError for what cannot be."""
    a = config.asynchronous
    check_choice("asynchronous.mode", a.mode, MODES)
    check_choice("asynchronous.policy", a.policy, POLICIES)
    for key in sorted({key for own in POLICY_SETTINGS.values() for key in own}):
        if a[key] is not None and key not in POLICY_SETTINGS.get(a.policy, {}):
            raise UserError(f"config.asynchronous.{key} is {a[key]}; policy {a.policy!r} has no use for it")
    for key in ("outer_lr", "outer_momentum"):
        if a[key] is not None and not 0 <= a[key] < (1 if key == "outer_momentum" else math.inf):
            may = "0 or more" + (", and less than 1" if key == "outer_momentum" else "")
            raise UserError(f"config.asynchronous.{key} is {a[key]}; it must be {may}")
    if a.mode == "live":
        _check_live(config)
    if a.table:
        _check_replay(config)
    _check_mitigations(config)
    build_delays(config)
    if a.table:
        _recorded(config)
    else:
        build_table(config, 1)


def _check_live(config: ConfigDict) -> None:
    a = config.asynchronous
    if a.policy not in LIVE:
        raise UserError(
            f"config.asynchronous.policy is {a.policy!r}; it must be {', '.join(LIVE)} with "
            "config.asynchronous.mode='live' (ssp with bound 0 is lock step)"
        )
    if a.table:
        raise UserError(f"config.asynchronous.table is {a.table!r}; it is for config.asynchronous.mode='emulated'")
    if "corrected_momentum" in named_mitigations(config):
        raise UserError(
            f"config.asynchronous.mitigations is {a.mitigations!r}; it must be without corrected_momentum, which needs "
            "the staleness before the run, with config.asynchronous.mode='live'"
        )

    _check_times(config, "config.asynchronous.mode='live', where things take the time they take", but=("slowdown",))


def _check_replay(config: ConfigDict) -> None:
    a = config.asynchronous
    if a.policy not in LIVE:
        raise UserError(f"config.asynchronous.policy is {a.policy!r}; it must be {', '.join(LIVE)} with a table")
    if a.bound is not None:
        raise UserError(
            f"config.asynchronous.bound is {a.bound}; it must be None with a table, which has kept to its own"
        )
    _check_times(config, "config.asynchronous.table, which has its own times")


def _check_times(config: ConfigDict, why: str, but: Collection[str] = ()) -> None:
    """Raises UserError for settings of delays that have no effect."""
    unset = {**Delays._field_defaults, "trace": ""}
    for key, value in config.asynchronous.delays.items():
        if key not in but and value != unset[key]:
            raise UserError(f"config.asynchronous.delays.{key} is {value!r}; it must be {unset[key]!r} with {why}")


def _check_mitigations(config: ConfigDict) -> None:
    a, given = config.asynchronous, named_mitigations(config)
    for name in given:
        check_choice("asynchronous.mitigations", name, MITIGATIONS)
    if given and a.policy in LOCAL:
        raise UserError(
            f"config.asynchronous.mitigations is {a.mitigations!r}; it must be '' with policy {a.policy!r}, whose "
            "workers take gradients of their local weights as they are"
        )
    if len(set(given)) < len(given):
        raise UserError(f"config.asynchronous.mitigations is {a.mitigations!r}; it must have each once")
    if a.dc_strength is not None and not 0 <= a.dc_strength < math.inf:
        raise UserError(f"config.asynchronous.dc_strength is {a.dc_strength}; it must be 0 or more")
    if len(set(given) & STRENGTHS.keys()) > 1:
        raise UserError(
            f"config.asynchronous.mitigations is {a.mitigations!r}; it must have one of {', '.join(STRENGTHS)}"
        )
    if a.dc_strength is not None and not set(given) & STRENGTHS.keys():
        raise UserError(f"config.asynchronous.dc_strength is {a.dc_strength}; it is for {', '.join(STRENGTHS)}")
    if (a.max_norm is None) == ("clip_by_staleness" in given) or (a.max_norm is not None and not a.max_norm > 0):
        raise UserError(
            f"config.asynchronous.max_norm is {a.max_norm}; it must be more than 0 with clip_by_staleness in "
            "config.asynchronous.mitigations, else None"
        )
    if "corrected_momentum" in given:
        _check_momentum(config.optimizer)


def _check_momentum(o: ConfigDict) -> None:
    key = optimizer.TRAITS[o.name].momentum
    where = "with corrected_momentum in config.asynchronous.mitigations"
    if key is None:
        names = [name for name, traits in optimizer.TRAITS.items() if traits.momentum]
        raise UserError(f"config.optimizer.name is {o.name!r}; it must be one of {', '.join(names)} {where}")
    if not o[key]:
        raise UserError(f"config.optimizer.{key} is {o[key]}; it must be more than 0 {where}")


def named_mitigations(config: ConfigDict) -> list[str]:
    """The names in config.asynchronous.mitigations."""
    return [name.strip() for name in config.asynchronous.mitigations.split(",") if name.strip()]


def build_table(config: ConfigDict, num_steps: int) -> UpdateTable:
    """Who computes which gradient from which weights, in a run of so many steps. Raises UserError where none can be."""
    a, times = config.asynchronous, build_delays(config)
    if a.table:
        made = _recorded(config)
        steps = int(made.step[-1]) + 1
        if steps != num_steps or len(made.update) != steps * made.num_workers:
            raise UserError(
                f"config.asynchronous.table is {a.table!r}, of {steps} steps and {len(made.update)} gradients; this "
                f"run has {num_steps} steps and {num_steps * a.num_workers} gradients"
            )
        return made
    sizes = {"num_workers": a.num_workers, "num_gradients": max(a.num_workers, 1) * num_steps}
    own = {key: value for key, value in settings(config).items() if key in ("bound", "groups", "interval")}
    try:
        made = simulate(a.policy, **sizes, delays=times, seed=config.seed, **own)
    except ValueError as error:
        raise UserError(f"config.asynchronous.{error}") from error
    table.validate(made)
    return made


def _recorded(config: ConfigDict) -> UpdateTable:
    """The table of a live run."""
    a = config.asynchronous
    found = table.read(a.table)
    if found.num_workers != a.num_workers:
        raise UserError(f"config.asynchronous.num_workers is {a.num_workers}; {a.table} has {found.num_workers}")
    if found.step[0]:
        raise UserError(
            f"config.asynchronous.table is {a.table!r}, which begins at step {found.step[0]}, where its run came from "
            "another strategy; only a table from step 0 on can be made again"
        )
    chunks = np.arange(len(found.chunk))
    if (np.sort(found.chunk) != chunks).any() or (found.chunk // a.num_workers > found.step).any():
        raise UserError(f"config.asynchronous.table is {a.table!r}, in which a chunk is missing or before its batch")
    if len(np.unique(found.step)) <= found.step[-1]:
        raise UserError(f"config.asynchronous.table is {a.table!r}, in which a step has no row")
    return found


def settings(config: ConfigDict) -> dict[str, Any]:
    """Of the policy."""
    a = config.asynchronous
    given = {key: default if a[key] is None else a[key] for key, default in POLICY_SETTINGS.get(a.policy, {}).items()}
    if a.policy == "softsync" and a.groups is None:
        given["groups"] = min(given["groups"], max(a.num_workers, 1))
    return given


def build_delays(config: ConfigDict) -> Delays:
    """How long things take. Raises UserError where that cannot be."""
    d = config.asynchronous.delays
    if (d.distribution == "trace") != bool(d.trace):
        raise UserError(
            f"config.asynchronous.delays.trace is {d.trace!r}; it must be the path of a CSV file with "
            "config.asynchronous.delays.distribution='trace', else ''"
        )
    times = Delays(**{**d, "trace": delays.read_trace(d.trace) if d.trace else ()})
    try:
        delays.check(times)
    except ValueError as error:
        raise UserError(f"config.asynchronous.delays.{error}") from error
    return times


def build_mitigations(config: ConfigDict, problem: Problem, updates: UpdateTable | None) -> tuple[Problem, Mitigations]:
    """The problem, with the optimizer that config.asynchronous.mitigations asks for, and what is around that.

    updates: None where the run is live.
    """
    a, given = config.asynchronous, named_mitigations(config)
    made: dict[str, optax.GradientTransformationExtraArgs] = {"staleness_aware": mitigations.staleness_aware()}
    for name, function in (("dc_asgd", mitigations.dc_asgd), ("adaptive_dc_asgd", mitigations.adaptive_dc_asgd)):
        made[name] = function(STRENGTHS[name] if a.dc_strength is None else a.dc_strength)
    made["clip_by_staleness"] = mitigations.clip_by_staleness(a.max_norm or 0.0)
    gradients = optax.chain(optax.identity(), *(made[name] for name in given if name in MITIGATIONS[:3]))
    around = optax.chain(optax.identity(), *(made[name] for name in given if name == "staleness_aware"))
    if "corrected_momentum" in given and updates is not None:
        key = optimizer.TRAITS[config.optimizer.name].momentum
        assert key is not None
        schedule = optimizer.build_schedule(config, problem.num_steps)

        def with_momentum(momentum: float) -> optax.GradientTransformation:
            own = config.copy_and_resolve_references()
            own.optimizer[key] = momentum
            return optimizer.build(own, schedule)

        staleness = float(updates.staleness.mean())
        corrected = mitigations.corrected_momentum(with_momentum, config.optimizer[key], staleness)
        problem = problem._replace(optimizer=corrected)
    return problem, Mitigations(gradients, around, needs_read=bool(set(given) & STRENGTHS.keys()))
