"""Generates a pipeline schedule of your own and writes it as CSV: 1F1B with two more forwards at the start.

    scripts/python scripts/examples/own_schedule.py [FILE]

Writes FILE, by default warm2.csv, for 4 stages and 8 microbatches. Copy this script, and change `order`, the order of
the actions of one device; `place_actions` finds the clocks, and raises ValueError if devices would wait for each other.
"""

import sys
from collections.abc import Iterator

from jaxpar.strategies.pipeline.tables.table import BW, Action, F, loop_stages, place_actions
from jaxpar.strategies.pipeline.tables.table_file import write_table
from jaxpar.strategies.pipeline.tables.validate import check_table

STAGES, MICROBATCHES, MORE = 4, 8, 2


def order(device: int) -> Iterator[Action]:
    """Yield the actions of a device: kind, microbatch and chunk."""
    ahead = min(MICROBATCHES, STAGES - device + MORE)  # forwards before the first backward; in 1F1B, STAGES - device
    yield from (Action(F, microbatch, 0) for microbatch in range(ahead))
    for microbatch in range(MICROBATCHES):
        yield Action(BW, microbatch, 0)
        if microbatch + ahead < MICROBATCHES:
            yield Action(F, microbatch + ahead, 0)


def main() -> int:
    """Write the table."""
    orders = [list(order(device)) for device in range(STAGES)]
    table = place_actions(orders, loop_stages(STAGES, 1), MICROBATCHES)
    check_table(table)
    write_table(table, sys.argv[1] if len(sys.argv) > 1 else "warm2.csv")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
