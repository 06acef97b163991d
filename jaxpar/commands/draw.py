"""Draws a pipeline schedule, by clock in a text file or on a time axis in a picture. Needs neither JAX nor devices.

Several schedules, separated by commas, are drawn below each other on one scale.

jaxpar draw --schedule=zb_h1 --num_stages=8 --num_microbatches=32 --out=zb_h1.svg
jaxpar draw --schedule=gpipe,1f1b,zb_h1 --num_stages=4 --num_microbatches=8 --out=three.png
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
    parser = options.schedule_parser(__doc__, "jaxpar draw", several="; or several, separated by commas")
    parser.add_argument("--out", type=output_path, metavar="FILE.{txt,svg,png}", help="file to write")
    arguments = parser.parse(argv)
    path = arguments.out
    if path is None or path.suffix not in SUFFIXES:
        given = "missing" if path is None else repr(str(path))
        raise UserError(f"--out is {given}; it must end in one of {', '.join(SUFFIXES)}")
    names = (arguments.schedule or "").split(",")
    if len(names) > 1 and arguments.save:
        raise UserError(f"--save is '{arguments.save}'; it must not be set with several schedules")
    charts, grids = [], []
    for name in names:
        arguments.schedule = name or None
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
        charts.append((title, simulation.timeline))
        grids.append(f"{title}\n{draw.format_table(table)}\n" if path.suffix == ".txt" else "")
    forward = arguments.forward
    unit = "the unit of --forward" if isinstance(forward, list) else f"F takes {forward:g}"
    with writing("--out", path):
        if path.suffix == ".txt":
            path.write_text("\n".join(grids))
        else:
            draw.save_charts(path, charts, axis=f"time ({unit})")
