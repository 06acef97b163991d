r"""Profiles the layers of a model for scripts/partition.py: times and sizes of the forward and backward pass.

    scripts/python scripts/profile_layers.py --config=configs/quickstart.py --out=profile.json [--device=H100]

Each layer runs alone on the first device, forward and backward, on a microbatch with the longest texts; layers that are
equal are measured once. With --device, nothing runs: the times are estimates from the peak rates of a GPU.
"""

import sys
import tempfile
from pathlib import Path

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import data, mesh
from jaxpar.choose.auto import measure_layers
from jaxpar.choose.costs.layers import TracedLayers
from jaxpar.choose.costs.profile import LayerProfile, write_profile
from jaxpar.choose.stages import until_chosen
from jaxpar.command_line import Parser, choice, integer, output_path
from jaxpar.errors import UserError, exit_code, format_bytes
from jaxpar.files import unwritable
from jaxpar.gpus import gpu_kinds
from jaxpar.run import build
from jaxpar.run.unused import EFFECTS, check_unused_keys


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.require("--config", "--config=configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.require("--out", "--out=profile.json", type=output_path, metavar="FILE.json", help="the file to write")
    add = parser.add_argument
    add(
        "--device",
        type=choice(gpu_kinds(), ignore_case=True),
        metavar="KIND",
        help=f"estimate the times on this GPU: {', '.join(gpu_kinds())}",
    )
    add(
        "--microbatch_size",
        type=integer(1),
        metavar="B",
        help="examples of a microbatch (default: config.batch_size divided by the replicas and microbatches)",
    )
    add("--repeats", type=integer(1), default=10, metavar="N", help="measurements of each layer (default: 10)")
    arguments, overrides = parser.parse_with_overrides()
    config = configs.load_config(arguments.config)
    check_unused_keys(config, configs.override(config, overrides), EFFECTS)  # a profile is for any strategy
    if not arguments.out.parent.is_dir() or arguments.out.is_dir():
        raise UserError(f"--out is {str(arguments.out)!r}; it must be the path of a file in a folder that exists")
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    with tempfile.TemporaryDirectory() as folder:
        there = clusters.find_cluster()
        stand_in = until_chosen(config, there, build.check_inputs(config, there))
        cluster, decision = build.check_run(stand_in, Path(folder))
        loaded = build.load_parts(stand_in, Path(folder), cluster)
    size = arguments.microbatch_size or config.batch_size // decision.batch_divisor
    if size > config.batch_size:
        raise UserError(f"--microbatch_size is {size}; it must be at most config.batch_size, {config.batch_size}")
    if arguments.device is None:
        layers = measure_layers(config, loaded, size, arguments.repeats)
    else:
        gpu = clusters.named_cluster(arguments.device, 1)
        layers = TracedLayers(loaded.problem, gpu).profile(size, config.pipeline.remat)
    try:
        write_profile(layers, arguments.out)
    except OSError as error:
        raise UserError(f"--out is {str(arguments.out)!r}; it must be {unwritable(arguments.out, error)}") from None
    print(as_text(layers))


def as_text(layers: list[LayerProfile]) -> str:
    """Return the profile as a table."""
    rows: list[tuple[str, ...]] = [("layer", "forward", "backward", "output", "stash", "weights")]
    for layer in layers:
        times = (f"{seconds * 1e3:.3g} ms" for seconds in (layer.forward_s, layer.backward_s))
        rows.append((layer.name, *times, *(format_bytes(size) for size in layer[3:6])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
