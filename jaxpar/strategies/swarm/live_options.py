"""Checks config.swarm for live mode, which needs Ray. Ray itself is imported later (jaxpar/strategies/swarm/live)."""

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec

from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.errors import UserError
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.swarm.costs import Workload
from jaxpar.strategies.swarm.messages import MessageFormat

ADDRESS = re.compile(r"[^/\s]+:(?P<port>\d{1,5})")
MOST_PEERS = 1000  # of a live swarm: its trainer routes every pass
MOST_RESOURCES = 10_000  # of a peer
RESOURCE_UNITS = 10_000  # Ray counts resources in ten-thousandths
ONLY_LIVE = ("address", "namespace", "peer_cpus", "peer_gpus", "join_seconds", "patience")
ONLY_EMULATED = ("trace", "failures", "forward_seconds", "delayed")


@dataclass(frozen=True)
class LiveDetails:
    """The details of a plan that the trainer needs."""

    stages: Stages  # the stages
    workload: Workload  # units of work of the passes, which are the FLOPs of a stage relative to the mean
    messages: MessageFormat  # form of activations and their gradients between peers
    num_microbatches: int  # number of microbatches of a step
    settings: ConfigDict  # config.swarm
    seed: int  # seed of the ties in routing


def check_other_mode(config: ConfigDict) -> None:
    """Raise UserError for keys that do not apply to config.swarm.mode, unless they have their default values."""
    mode, default = config.swarm.mode, configs.keys(configs.default_config())
    others = ONLY_EMULATED if mode == "live" else ONLY_LIVE
    for key, value in configs.changed_keys(config).items():
        section, *names = key.split(".")
        if section == "swarm" and names[0] in others:
            raise UserError(f"config.{key} is {value!r}; it must be {default[key]!r} with config.swarm.mode={mode!r}")


def check_ray() -> None:
    """Raise UserError for live mode in a Python without Ray."""
    if find_spec("ray") is None:
        raise UserError(
            "config.swarm.mode is 'live'; it must be 'emulated' without Ray, which `pip install 'jaxpar[swarm]'` "
            "installs, and `scripts/setup swarm` in a clone"
        )


def check_live(config: ConfigDict) -> None:
    """Raise UserError for invalid settings of live mode."""
    s = config.swarm
    is_number = s.peers.isascii() and s.peers.isdecimal() and len(s.peers) <= len(str(MOST_PEERS))
    if not is_number or not s.stages <= int(s.peers) <= MOST_PEERS:
        raise UserError(
            f"config.swarm.peers is {s.peers[:40]!r}; it must be a number, at least {s.stages} (config.swarm.stages) "
            f"and at most {MOST_PEERS}, with config.swarm.mode='live'"
        )
    address = ADDRESS.fullmatch(s.address)
    if s.address not in ("", "auto") and not (address and 0 < int(address["port"]) < 2**16):
        raise UserError(f"config.swarm.address is {s.address!r}; it must be HOST:PORT, auto, or empty")
    if not 0 <= s.join_seconds < math.inf:
        raise UserError(f"config.swarm.join_seconds is {s.join_seconds}; it must be finite and at least 0")
    for key in ("peer_cpus", "peer_gpus"):
        if not 0 <= s[key] <= MOST_RESOURCES:
            raise UserError(f"config.swarm.{key} is {s[key]}; it must be between 0 and {MOST_RESOURCES:,}")
    for key in ("peer_cpus", "peer_gpus"):
        if math.isfinite(s[key]) and not math.isclose(s[key] * RESOURCE_UNITS, round(s[key] * RESOURCE_UNITS)):
            raise UserError(f"config.swarm.{key} is {s[key]}; it must be a multiple of {1 / RESOURCE_UNITS}")
    if s.peer_gpus > 1 and s.peer_gpus % 1:
        raise UserError(f"config.swarm.peer_gpus is {s.peer_gpus}; it must be a whole number or less than 1")
    if s.peer_cpus == 0 and s.peer_gpus == 0:
        raise UserError("config.swarm.peer_cpus is 0.0; it must be greater than 0 if config.swarm.peer_gpus is 0")
    if not 1 < s.patience < math.inf:
        raise UserError(f"config.swarm.patience is {s.patience}; it must be finite and greater than 1")
