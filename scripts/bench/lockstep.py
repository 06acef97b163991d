"""Prints by how much a search in lockstep beats the best named schedule, and how close it is to the lower bound.

    scripts/python scripts/bench/lockstep.py [--width=16]

The grid has p = 2, 3, 4 and 8 stages, p, 2p and 4p microbatches, four kinds of action times, and memory for p / 2, p
and 2p - 1 microbatches on every device; 1f1b needs p, and zb_h2 needs 2p - 1. Each row states the best named schedule
with one stage per device that fits.
"""

import itertools
import sys
import time

from jaxpar.choose.search.lockstep_search import lockstep_bound, search_lockstep
from jaxpar.command_line import Parser, integer
from jaxpar.errors import exit_code
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table, schedule_obstacle
from jaxpar.strategies.pipeline.tables.simulate import Times, lockstep
from jaxpar.strategies.pipeline.tables.table import loop_stages
from jaxpar.strategies.pipeline.tables.validate import check_table, peak_stashed

STAGES = (2, 3, 4, 8)
HEADER = "| stages | microbatches | F, B, W | memory | best named | found | bound | found / named | found / bound | s |"


def times_of(num_stages: int) -> dict[str, Times]:
    """Return the action times of the grid, by name. The unequal stages are the first and the last one."""
    unequal = [1.25, *[1.0] * (num_stages - 2), 1.5]
    return {
        "1, 1, 1": Times(1, 1, 1),
        "1, 2, 0": Times(1, 2, 0),
        "1.74, 1.88, 1.61": Times(1.74, 1.88, 1.61),
        "1, 1, 1; first 1.25, last 1.5": Times(unequal, unequal, unequal),
    }


def row(num_stages: int, num_microbatches: int, name: str, times: Times, memory: int, width: int) -> str:
    """Search, and return a row of the table."""
    sizes = {"num_devices": num_stages, "num_microbatches": num_microbatches, "num_chunks": 1}
    named = {}
    for schedule in SCHEDULES:
        if schedule_obstacle(schedule, **sizes) is None:
            table = make_table(schedule, **sizes)
            if peak_stashed(table).max() <= memory:
                named[schedule] = lockstep(table, times)
    best = min(named, key=lambda schedule: named[schedule])
    start = time.perf_counter()
    table = search_lockstep(times, 0, memory, num_stages, num_microbatches, width=width).table
    seconds = time.perf_counter() - start
    check_table(table)
    assert peak_stashed(table).max() <= memory
    found = lockstep(table, times)
    bound = lockstep_bound(times, 0, memory, num_microbatches, loop_stages(num_stages, 1))
    cells = (num_stages, num_microbatches, name, memory, f"{best} {named[best]:.6g}", f"{found:.6g}", f"{bound:.6g}")
    ratios = f"{found / named[best]:.3f} | {found / bound:.3f} | {seconds:.1f}"
    return f"| {' | '.join(map(str, cells))} | {ratios} |"


def main() -> None:
    """Print the grid."""
    parser = Parser(__doc__)
    parser.add_argument("--width", type=integer(1), default=16, help="partial tables that the search keeps")
    parsed = parser.parse()
    print(HEADER, "|---" * HEADER.count(" |") + "|", sep="\n")
    for p in STAGES:
        for factor, (name, times), memory in itertools.product(
            (1, 2, 4), times_of(p).items(), (max(p // 2, 1), p, 2 * p - 1)
        ):
            print(row(p, factor * p, name, times, memory, parsed.width), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
