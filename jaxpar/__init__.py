"""Distributed training in JAX: every parallel strategy is a line of config."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.config import load_config as load_config
    from jaxpar.inspect.certificate_report import certify as certify
    from jaxpar.inspect.functions import certify_functions as certify_functions
    from jaxpar.inspect.plan_report import plan as plan
    from jaxpar.training import train as train
    from jaxpar.use.inference.api import load as load
    from jaxpar.use.inference.api import predict as predict

# name -> module. They are imported on first use, because `import jaxpar` must not import JAX.
LAZY = {
    "certify": "jaxpar.inspect.certificate_report",
    "certify_functions": "jaxpar.inspect.functions",
    "load": "jaxpar.use.inference.api",
    "load_config": "jaxpar.config",
    "plan": "jaxpar.inspect.plan_report",
    "predict": "jaxpar.use.inference.api",
    "train": "jaxpar.training",
}


def __getattr__(name: str) -> Any:
    """Import a function on first use."""
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)


def __dir__() -> list[str]:
    """Return the names of the module, including those that are imported on first use."""
    return [*globals(), *LAZY]
