r"""Profiles the layers of a model for `jaxpar partition`: times and sizes of the forward and backward pass.

    jaxpar partition profile --config=configs/quickstart.py --out=profile.json [--device=H100]

Each layer runs alone on the first device, forward and backward, on a microbatch with the longest texts; layers that are
equal are measured once. With --device, nothing runs: the times are estimates from the peak rates of a GPU.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxpar import cluster as clusters
from jaxpar.choose.auto import measure_layers
from jaxpar.choose.costs.profile import write_profile
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.choose.stages import until_chosen
from jaxpar.cluster.gpus import gpu_kinds
from jaxpar.command_line import check_new_file, choice, format_rows, integer, output_path, writing
from jaxpar.commands.config_flags import ConfigParser
from jaxpar.errors import UserError, format_bytes
from jaxpar.run import build
from jaxpar.run.unused import EFFECTS


def main(argv: Sequence[str]) -> None:
    parser = ConfigParser(__doc__, "jaxpar partition profile")
    parser.require("--out", "--out=profile.json", type=output_path, metavar="FILE.json", help="the file to write")
    add, kinds = parser.add_argument, gpu_kinds()
    on = f"estimate the times on this GPU: {', '.join(kinds)}"
    of = "examples of a microbatch (default: config.batch_size divided by the replicas and microbatches)"
    add("--device", type=choice(kinds, ignore_case=True), metavar="KIND", help=on)
    add("--microbatch_size", type=integer(1), metavar="B", help=of)
    add("--repeats", type=integer(1), default=10, metavar="N", help="measurements of each layer (default: 10)")
    arguments, config = parser.read(argv, EFFECTS)  # a profile is for any strategy
    check_new_file("--out", arguments.out)
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
    with writing("--out", arguments.out):
        write_profile(layers, arguments.out)
    rows: list[tuple[str, ...]] = [("layer", "forward", "backward", "output", "stash", "weights")]
    for layer in layers:
        times = (f"{seconds * 1e3:.3g} ms" for seconds in (layer.forward_s, layer.backward_s))
        rows.append((layer.name, *times, *(format_bytes(size) for size in layer[3:6])))
    print(format_rows(rows, right=True))
