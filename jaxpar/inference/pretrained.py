"""Loads a language model from a directory in Hugging Face format, without a run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from tokenizers import Tokenizer

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import mesh as meshes
from jaxpar import models, tasks
from jaxpar.data import DataInfo
from jaxpar.data.text import named_tokenizer
from jaxpar.data.tokenizer import read_tokenizer, vocab_size
from jaxpar.inference.trained import Trained
from jaxpar.mesh import DATA, STAGE
from jaxpar.models import hf
from jaxpar.strategies.placement import on_all


def is_pretrained(directory: Path) -> bool:
    """Return whether a directory is not the workdir of a run, but has the files of a model in Hugging Face format."""
    return not (directory / "checkpoints").exists() and any(directory.glob("*.safetensors*"))


def load_language_model(
    directory: Path, devices: Sequence[jax.Device] | None = None, *, log: Callable[[str], None] = print
) -> Trained:
    """Load a causal language model from a directory that contains config.json, weights and a tokenizer.

    Args:
      directory: the directory, as for config.model.init_from.
      devices: the devices to use; None: all.
      log: called with one line about the weights.

    Raises:
      UserError: a file is missing or damaged, or the model is of another kind.
    """
    config = configs.default_config()
    config.task, config.model.name, config.model.init_from = "causal_lm", "gpt", str(directory)
    hf.apply_directory(config)
    path = named_tokenizer(config)
    assert path is not None
    tokenizer = Tokenizer.from_str(read_tokenizer(path))
    config.data.max_length = hf.longest_text(directory)
    info = DataInfo("text", (config.data.max_length,), 0, (), vocab_size(tokenizer), 0)
    devices = clusters.devices() if devices is None else devices
    model = models.build(config, info, clusters.find_cluster())
    params = hf.load_params(model, model.shapes, directory, info, log)
    mesh = meshes.make_mesh({DATA: len(devices), STAGE: 1}, devices)
    params = jax.device_put(params, on_all(mesh))
    return Trained(directory, 0, config, info, tasks.find_task(config), model, params, tokenizer, mesh)
