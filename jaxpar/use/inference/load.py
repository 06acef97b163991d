"""Loads what a run has trained, onto the devices at hand, whatever strategy and devices trained it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from flax import serialization
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from jaxpar import checkpoint, data, models, tasks
from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar.checkpoint import checksums
from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.data import DataInfo
from jaxpar.data.text import named_tokenizer
from jaxpar.data.tokenizer import read_tokenizer, vocab_size
from jaxpar.errors import UserError
from jaxpar.models import Model, Params, hf
from jaxpar.strategies.placement import on_all
from jaxpar.tasks import Names, Task

# How a model is computed for prediction: as the devices at hand decide, with nothing stored for a backward pass.
PREDICTION_OPTIONS = {"remat": "none", "scan_layers": "auto", "flatten_positions": "auto", "attention": "auto"}


@dataclass(frozen=True)
class Trained:
    """A trained model and what is needed to use it."""

    workdir: Path  # the workdir of the run
    step: int  # the step of the checkpoint
    config: ConfigDict  # the config with which the checkpoint was saved, except for PREDICTION_OPTIONS
    info: DataInfo  # properties of the training data, with the names of classes and targets
    task: Task
    model: Model  # without dropout keys, `Model.outputs` computes no dropout
    params: Params  # replicated on all devices of the mesh
    tokenizer: Tokenizer | None  # None without texts; a copy is needed to set its truncation or padding
    mesh: Mesh  # the devices, all on the data axis

    @property
    def names(self) -> Names:
        """The names that make outputs readable. Tokens without a tokenizer are numbers."""
        decode = self.tokenizer.decode if self.tokenizer else lambda tokens: " ".join(map(str, tokens))
        return Names(self.info, decode)


def prepare(workdir: Path) -> None:
    """Configure JAX for the model of a run, before it is used: the platform, and the cache of compiled programs.

    Raises UserError if there is no run in `workdir`.
    """
    config = configs.read_config(workdir)
    config.mesh.virtual_cpu_devices = 0  # those of the run are not needed
    meshes.prepare_jax(config, data.cache_dir(config) / "xla")


def load_trained(
    workdir: str | Path,
    step: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    *,
    log: Callable[[str], None] = print,
) -> Trained:
    """Load the model that the run in `workdir` has trained.

    Args:
      workdir: the workdir of the run.
      step: the step of the checkpoint. None: the one with the lowest validation loss or, if no loss was measured or
        that checkpoint is damaged, the newest intact one.
      devices: the devices to use; None: all.
      log: called with one line for each damaged checkpoint that was replaced by another one.

    Raises:
      UserError: there is no run or no such checkpoint, or one of its files is damaged or from a different model.
    """
    if not isinstance(workdir, str | Path):
        raise UserError(f"workdir is {workdir!r:.60}; it must be the path of a directory")
    if step is not None and type(step) is not int:
        raise UserError(f"step is {step!r:.60}; it must be an integer, or None")
    is_list = isinstance(devices, list | tuple) and len(devices) > 0
    if devices is not None and not (is_list and all(isinstance(device, jax.Device) for device in devices)):
        raise UserError(f"devices is {devices!r:.60}; it must be a non-empty list of JAX devices, or None")
    workdir = Path(workdir)
    devices = clusters.devices() if devices is None else devices
    saved = checkpoint.of_run(workdir, step, best=True, log=log)
    config = checkpoint.config_of(saved, workdir)
    with config.ignore_type():  # a resolved reference has the type of its value
        config.model.update(PREDICTION_OPTIONS)
    info = data.read_info(workdir)
    cluster = replace(clusters.find_cluster(), num_devices=len(devices))
    model = models.build(config, info, cluster)
    where = workdir / "checkpoints" / str(saved.step)
    _check_params(saved.tree["params"], serialization.to_state_dict(model.shapes), where)
    has_tokenizer = info.kind == "text" and config.data.source != "synthetic"
    tokenizer = Tokenizer.from_str(read_tokenizer(workdir / "tokenizer.json")) if has_tokenizer else None
    if tokenizer and (size := vocab_size(tokenizer)) != info.vocab_size:
        path = workdir / "tokenizer.json"
        raise UserError(f"{path} has {size} tokens; it must be that of the run, which has {info.vocab_size}")
    mesh = meshes.make_mesh({DATA: len(devices), STAGE: 1}, devices)
    params: Params = serialization.from_state_dict(model.shapes, saved.tree["params"])
    params = jax.device_put(params, on_all(mesh))
    return Trained(workdir, saved.step, config, info, tasks.find_task(config), model, params, tokenizer, mesh)


def _check_params(params: Params, shapes: Params, where: Path) -> None:
    """Raise UserError if the parameters of the checkpoint `where` do not have these shapes."""
    found, expected = ({name: x.shape for name, x in checksums.by_path(tree).items()} for tree in (params, shapes))
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            is_now, must_be = found.get(name, "missing"), expected.get(name, "missing")
            raise UserError(f"checkpoint {where} is from a different model: {name} is {is_now}; it must be {must_be}")


def is_pretrained(directory: Path) -> bool:
    """Return whether a directory is not the workdir of a run, but has the files of a model in Hugging Face format."""
    return not (directory / "checkpoints").exists() and any(directory.glob("*.safetensors*"))


def load_language_model(
    directory: Path, devices: Sequence[jax.Device] | None = None, *, log: Callable[[str], None] = print
) -> Trained:
    """Load a causal language model from a directory, as for config.model.init_from, with a tokenizer.

    Raises UserError if a file is missing or damaged, or the model is of another kind. log: takes a line about weights.
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
