"""Writes a trained model as a StableHLO program with its parameters, which JAX runs without jaxpar.

    DIRECTORY/program.jax_export    `jax.export.Exported`, serialized: parameters, batch -> outputs
    DIRECTORY/parameters.npz        the parameters by name
    DIRECTORY/program.json          inputs, outputs, names of classes, and where the program comes from
    DIRECTORY/tokenizer.json        the tokenizer of a run on text

The parameters are not in the program, because a serialized program must be smaller than 2 GiB, and because constants
would be compiled again for each shape. One program computes batches of any size and texts of any length up to the
longest of the run: these dims are symbolic.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export
from ml_collections import ConfigDict

from jaxpar import models, tasks
from jaxpar.checkpoint import Checkpoint
from jaxpar.cluster import named_cluster
from jaxpar.data import DataInfo
from jaxpar.errors import UserError

PLATFORMS = ("cpu", "cuda")
Input = tuple[
    str, tuple[int | str, ...]
]  # dtype and shape of an array of the batch; a str in a shape is a symbolic dim
INPUT_DTYPES = {"image": "uint8", "vector": "float32"}  # of the inputs for a kind of data


def save_program(saved: Checkpoint, config: ConfigDict, info: DataInfo, tokenizer: Path, directory: Path) -> None:
    """Write the program of a checkpoint to an empty directory, with the run's tokenizer.json if it exists.

    Raises UserError if the model is a user's own and cannot be computed with symbolic dims.
    """
    params = {name: np.asarray(x) for name, x in flatten_dict(saved.tree["params"], sep=".").items()}
    inputs = batch_inputs(config, info)
    exported = _export(config, info, params, inputs)
    (directory / "program.jax_export").write_bytes(exported.serialize())
    np.savez(directory / "parameters.npz", **params)  # type: ignore[arg-type]  # no parameter is named allow_pickle
    contents = {
        "program": "program.jax_export",
        "parameters": "parameters.npz",
        "tokenizer": "tokenizer.json" if tokenizer.is_file() else None,
        "platforms": exported.platforms,
        "jax_version": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
        "step": saved.step,
        "task": config.task,
        "inputs": {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in inputs.items()},
        "outputs": [
            {"dtype": x.dtype.name, "shape": [size if isinstance(size, int) else str(size) for size in x.shape]}
            for x in exported.out_avals
        ],
        "max_length": info.input_shape[0] if info.kind == "text" else None,
        "pad_id": info.pad_id if info.kind == "text" else None,
        "class_names": info.class_names,
        "targets": info.targets,
    }
    (directory / "program.json").write_text(json.dumps(contents, indent=2) + "\n")
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, directory / "tokenizer.json")


def batch_inputs(config: ConfigDict, info: DataInfo) -> dict[str, Input]:
    """Return the arrays of a batch that the model reads. See jaxpar.data for their meaning."""
    if info.kind != "text":
        return {"inputs": (INPUT_DTYPES[info.kind], ("batch", *info.input_shape))}
    dtypes = {"inputs": "int32"}
    if tasks.find_task(config).head != "causal_lm":
        dtypes["mask"] = "bool"
        if len(config.data.text_columns) == 2:
            dtypes["segments"] = "int32"
    return {name: (dtype, ("batch", "length")) for name, dtype in dtypes.items()}


def _export(
    config: ConfigDict, info: DataInfo, params: dict[str, np.ndarray], inputs: dict[str, Input]
) -> export.Exported:
    """Return the program (parameters by name, batch) -> outputs, one float32 array of logits or targets."""
    config = config.copy_and_resolve_references()
    with config.ignore_type():
        # The fastest on CPUs that also compiles for GPUs. Rematerialization only concerns gradients.
        config.model.update(
            attention="batched", scan_layers=False, flatten_positions=True, recompute_activations=False, remat="none"
        )
    model = models.build(config, info, named_cluster("cpu", 1))
    names = {path: ".".join(map(str, path)) for path in flatten_dict(model.shapes)}
    assert set(names.values()) == params.keys(), names

    def predict(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return model.apply(unflatten_dict({path: params[name] for path, name in names.items()}), batch)

    scope = export.SymbolicScope([f"length <= {info.input_shape[0]}"] if info.kind == "text" else [])
    batch = {
        name: jax.ShapeDtypeStruct(export.symbolic_shape(",".join(map(str, shape)), scope=scope), np.dtype(dtype))
        for name, (dtype, shape) in inputs.items()
    }
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    try:
        return export.export(jax.jit(predict), platforms=PLATFORMS)(shapes, batch)
    except Exception as error:
        if config.model.name in models.MODELS:
            raise
        raise UserError(
            f"config.model.name is {config.model.name!r}; its layers must accept a batch and a text of any size: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
