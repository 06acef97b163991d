"""Flags of the commands that read a config: --config and overrides, and the checks of both."""

import argparse
from collections.abc import Collection, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import data
from jaxpar.command_line import Parser
from jaxpar.core import mesh
from jaxpar.errors import UserError
from jaxpar.run.unused import EVERY_EFFECT, check_unused_keys


class ConfigParser(Parser):
    """A parser of a command line with --config and overrides."""

    def __init__(self, description: str | None, prog: str, example: str = "configs/quickstart.py") -> None:
        """Make a parser with the flags --help and --config. example: a config, for the error message."""
        super().__init__(description, prog)
        self.require("--config", f"--config={example}", help="config file as PATH[:PRESET]")

    def read(
        self, argv: Sequence[str], effects: Collection[Any] = EVERY_EFFECT
    ) -> tuple[argparse.Namespace, ConfigDict]:
        """Return the arguments and the config, for which JAX is configured. effects: as in `load_checked`."""
        arguments, overrides = self.parse_with_overrides(argv)
        strategy = getattr(arguments, "strategy", None)  # a flag of some commands
        if strategy is not None:
            overrides = [f"--config.strategy={strategy}", *overrides]
        config = load_checked(arguments.config, overrides, effects)
        if strategy not in (None, config.strategy):
            raise UserError(f"--strategy is {strategy!r}; it must be {config.strategy!r}, as --config.strategy is")
        mesh.prepare_jax(config, data.cache_dir(config) / "xla")
        return arguments, config


def load_checked(name: str, overrides: Sequence[str], effects: Collection[Any] = EVERY_EFFECT) -> ConfigDict:
    """Return a config with overrides, each of which must have one of the effects, as in `check_unused_keys`."""
    config = configs.load_config(name)
    check_unused_keys(config, configs.override(config, overrides), effects)
    return config
