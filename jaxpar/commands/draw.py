"""Draws a pipeline schedule, by clock in a text file or on a time axis in a picture. Needs neither JAX nor devices.

jaxpar draw --schedule=zb_h1 --num_stages=8 --num_microbatches=32 --out=zb_h1.svg
jaxpar draw --schedule=mine.csv --forward=2 --backward=2.2 --weight=1.8 --out=mine.txt
"""

from collections.abc import Sequence

from jaxpar.command_line import output_path, writing
from jaxpar.commands import schedule_flags as options
from jaxpar.errors import UserError
from jaxpar.strategies.pipeline.tables import draw

SUFFIXES = (".txt", ".svg", ".png")
MAX_CELLS = 10_000_000  # of a text: 50 MB


def main(argv: Sequence[str]) -> None:
    parser = options.schedule_parser(__doc__, "jaxpar draw")
    parser.add_argument("--out", type=output_path, metavar="FILE.{txt,svg,png}", help="file to write")
    arguments = parser.parse(argv)
    path = arguments.out
    if path is None or path.suffix not in SUFFIXES:
        given = "missing" if path is None else repr(str(path))
        raise UserError(f"--out is {given}; it must end in one of {', '.join(SUFFIXES)}")
    schedule, simulation = options.find_schedule(arguments)
    table = schedule.table
    if path.suffix == ".txt" and table.num_devices * table.num_clocks > MAX_CELLS:
        raise UserError(
            f"--out is '{path}'; it must end in .svg or .png with {table.num_devices:,} devices and "
            f"{table.num_clocks:,} clocks, because a text has at most {MAX_CELLS:,} cells"
        )
    title = (
        f"{schedule.policy}, {table.num_devices} devices, {table.num_microbatches} microbatches: "
        f"bubble {simulation.bubble_rate:.1%}"
    )
    forward = arguments.forward
    unit = "the unit of --forward" if isinstance(forward, list) else f"F takes {forward:g}"
    with writing("--out", path):
        if path.suffix == ".txt":
            path.write_text(f"{title}\n{draw.format_table(table)}\n")
        else:
            draw.save_charts(path, [(title, simulation.timeline)], axis=f"time ({unit})")
