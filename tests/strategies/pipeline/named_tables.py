"""The grid of tables for the tests of this folder."""

from collections.abc import Iterator

from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.strategies.pipeline.tables.table import Table


def make(name: str, p: int, m: int, v: int | None = None) -> Table:
    """Make the table of a named schedule for p devices and m microbatches, by default with its number of chunks."""
    return make_table(name, num_devices=p, num_microbatches=m, num_chunks=v or SCHEDULES[name].num_chunks)


def grid(name: str, most_devices: int = 8, most_microbatches: int = 16) -> Iterator[Table]:
    """Yield a schedule on 1-8 devices with 1-16 microbatches, and with 1-3 chunks if it supports any number."""
    for p in range(1, most_devices + 1):
        for m in range(1, most_microbatches + 1):
            if not SCHEDULES[name].any_chunks:
                yield make(name, p, m)
            elif m % p == 0:
                for v in (1, 2, 3):
                    yield make(name, p, m, v)
