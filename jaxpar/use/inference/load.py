"""Loads what a run has trained, onto the devices at hand, whatever strategy and devices trained it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import serialization
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from jaxpar import checkpoint, data, models, tasks
from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar.checkpoint import checksums
from jaxpar.core import mesh as meshes
from jaxpar.core.groups import InferenceGroup, split_layout
from jaxpar.core.mesh import DATA, TENSOR
from jaxpar.data import DataInfo
from jaxpar.data.text import named_tokenizer
from jaxpar.data.tokenizer import read_tokenizer, vocab_size
from jaxpar.errors import UserError
from jaxpar.layout import Layout
from jaxpar.models import Model, Params, hf
from jaxpar.strategies.groups import check_split
from jaxpar.tasks import Names, Task

# How a model is computed for prediction: as the devices at hand decide, with nothing stored for a backward pass.
PREDICTION_OPTIONS = {
    "remat": "none",
    "scan_layers": "auto",
    "flatten_positions": "auto",
    "recompute_activations": "auto",
    "attention": "auto",
}


@dataclass(frozen=True)
class Trained:
    """A trained model and what is needed to use it."""

    workdir: Path  # the workdir of the run
    step: int  # the step of the checkpoint
    config: ConfigDict  # the config with which the checkpoint was saved, except for PREDICTION_OPTIONS
    info: DataInfo  # properties of the training data, with the names of classes and targets
    task: Task
    model: Model  # of one device; without dropout keys, `Model.outputs` computes no dropout
    params: Params  # the global form of `layout`: replicated on all devices, except for a tensor axis
    tokenizer: Tokenizer | None  # None without texts; a copy is needed to set its truncation or padding
    mesh: Mesh  # the devices: replicas on the data axis, and the devices of each one on the tensor axis

    @cached_property
    def layout(self) -> Layout:
        """The layout of the parameters."""
        return split_layout(self.mesh.shape, self.model.shapes, self.model)

    @cached_property
    def local_model(self) -> Model:
        """The model as the devices of a replica compute it inside `program`, each with its part of the parameters."""
        size = self.mesh.shape[TENSOR]
        return self.model.in_group(InferenceGroup(size), self.layout.local_shapes) if size > 1 else self.model

    def program(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return a program of all devices: `function` of the parameters and of arguments with these partition specs."""
        specs = self.layout.specs, *in_specs
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    def first_replica(self) -> "Trained":
        """Return the model on the devices of the first replica alone."""
        mesh = Mesh(self.mesh.devices[:1], self.mesh.axis_names, axis_types=self.mesh.axis_types)
        return replace(self, mesh=mesh, params=jax.device_put(self.params, self.layout.shardings(mesh)))

    @property
    def names(self) -> Names:
        """The names that make outputs readable. Tokens without a tokenizer are numbers."""
        decode = self.tokenizer.decode if self.tokenizer else lambda tokens: " ".join(map(str, tokens))
        return Names(self.info, decode)


def prepare(workdir: Path) -> None:
    """Configure JAX for the model of a run, before it is used: the platform, and the cache of compiled programs.

    Raises UserError if there is no run in `workdir`.
    """
    logging.set_verbosity(logging.FATAL)  # orbax also logs the errors that it raises
    config = configs.read_config(workdir)
    config.mesh.virtual_cpu_devices = 0  # those of the run are not needed
    meshes.prepare_jax(config, data.cache_dir(config) / "xla")


def load_trained(
    workdir: str | Path,
    step: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    *,
    tensor: int = 1,
    log: Callable[[str], None] = print,
) -> Trained:
    """Load the model that the run in `workdir` has trained.

    Args:
      workdir: the workdir of the run.
      step: the step of the checkpoint. None: the one with the lowest validation loss or, if no loss was measured or
        that checkpoint is damaged, the newest intact one.
      devices: the devices to use; None: all.
      tensor: number of devices that compute each layer together, each with a part of the parameters. Several such
        groups each compute a part of the predictions.
      log: called with one line for each damaged checkpoint that was replaced by another one.

    Raises:
      UserError: there is no run or no such checkpoint, one of its files is damaged or from a different model, or the
        devices cannot divide the model.
    """
    if not isinstance(workdir, str | Path):
        raise UserError(f"workdir is {workdir!r:.60}; it must be the path of a directory")
    if step is not None and type(step) is not int:
        raise UserError(f"step is {step!r:.60}; it must be an integer, or None")
    is_list = isinstance(devices, list | tuple) and len(devices) > 0
    if devices is not None and not (is_list and all(isinstance(device, jax.Device) for device in devices)):
        raise UserError(f"devices is {devices!r:.60}; it must be a non-empty list of JAX devices, or None")
    workdir = Path(workdir)
    mesh = _mesh_of(devices, tensor)
    saved = checkpoint.of_run(workdir, step, best=True, log=log)
    config = checkpoint.config_of(saved, workdir)
    with config.ignore_type():  # a resolved reference has the type of its value
        config.model.update(PREDICTION_OPTIONS)
    info = data.read_info(workdir)
    cluster = replace(clusters.find_cluster(), num_devices=mesh.size)
    model = models.build(config, info, cluster)
    where = workdir / "checkpoints" / str(saved.step)
    _check_params(saved.tree["params"], serialization.to_state_dict(model.shapes), where)
    has_tokenizer = info.kind == "text" and config.data.source != "synthetic"
    tokenizer = Tokenizer.from_str(read_tokenizer(workdir / "tokenizer.json")) if has_tokenizer else None
    if tokenizer and (size := vocab_size(tokenizer)) != info.vocab_size:
        path = workdir / "tokenizer.json"
        raise UserError(f"{path} has {size} tokens; it must be that of the run, which has {info.vocab_size}")
    params: Params = serialization.from_state_dict(model.shapes, saved.tree["params"])
    task = tasks.find_task(config)
    return place(Trained(workdir, saved.step, config, info, task, model, params, tokenizer, mesh))


def _mesh_of(devices: Sequence[jax.Device] | None, tensor: int) -> Mesh:
    """Return the mesh of groups of `tensor` devices, of these or all. Raises UserError if they are too few."""
    devices = clusters.devices() if devices is None else devices
    if type(tensor) is not int or not 1 <= tensor <= len(devices):
        must = "1" if len(devices) == 1 else f"from 1 to {len(devices)}"
        is_cpu = devices[0].platform == "cpu"
        hint = " (XLA_FLAGS=--xla_force_host_platform_device_count=N splits the CPU into N devices)" * is_cpu
        raise UserError(f"tensor is {tensor!r:.60}; it must be {must}, the number of devices{hint}")
    return meshes.make_mesh({DATA: len(devices) // tensor, TENSOR: tensor}, devices)


def place(trained: Trained) -> Trained:
    """Return a model with its parameters, in NumPy, on its devices. Raises UserError if these cannot divide it."""
    if (tensor := trained.mesh.shape[TENSOR]) > 1:
        check_split("tensor", tensor, trained.config, trained.model.tensor)
    params = trained.layout.to_global(trained.params, np)
    return replace(trained, params=jax.device_put(params, trained.layout.shardings(trained.mesh)))


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
    directory: Path,
    devices: Sequence[jax.Device] | None = None,
    *,
    tensor: int = 1,
    log: Callable[[str], None] = print,
) -> Trained:
    """Load a causal language model from a directory, as for config.model.init_from, with a tokenizer.

    Raises UserError if a file is missing or damaged, or the model is of another kind. tensor: as for `load_trained`.
    log: takes a line about weights.
    """
    mesh = _mesh_of(devices, tensor)
    config = configs.default_config()
    config.task, config.model.name, config.model.init_from = "causal_lm", "gpt", str(directory)
    hf.apply_directory(config)
    path = named_tokenizer(config)
    assert path is not None
    tokenizer = Tokenizer.from_str(read_tokenizer(path))
    config.data.max_length = hf.longest_text(directory)
    info = DataInfo("text", (config.data.max_length,), 0, (), vocab_size(tokenizer), 0)
    model = models.build(config, info, clusters.find_cluster())
    params = hf.load_params(model, model.shapes, directory, info, log)
    return place(Trained(directory, 0, config, info, tasks.find_task(config), model, params, tokenizer, mesh))
