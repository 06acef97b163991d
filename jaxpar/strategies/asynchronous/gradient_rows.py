"""Rows of an update table in the form that engines run, and the lifetimes of earlier weights. NumPy only."""

from typing import NamedTuple

import numpy as np

from jaxpar.strategies.asynchronous.device_numbers import DeviceNumbers
from jaxpar.strategies.asynchronous.table import UpdateTable


class GradientRow(NamedTuple):
    """An arriving gradient."""

    worker: int  # the worker that computes it
    read: int  # the version of the weights that it is computed from
    update: int  # the version that it is applied to
    chunk: int  # number of its shard of the data
    staleness: int  # update - read
    is_first: bool  # whether it is the first gradient of its update
    is_last: bool  # whether it is the last one
    size: int  # number of gradients in its update
    mean_share: float  # mean of 1 / max(staleness, 1) over all gradients of its update


def single_row(worker: int, read: int, update: int, chunk: int) -> GradientRow:
    """Return the row of a gradient that makes an update alone."""
    staleness = update - read
    return GradientRow(worker, read, update, chunk, staleness, True, True, 1, 1 / max(staleness, 1))


def rows_by_step(table: UpdateTable) -> list[list[GradientRow]]:
    """Return the rows of each step."""
    sizes = np.bincount(table.update)
    means = np.bincount(table.update, 1 / np.maximum(table.staleness, 1)) / sizes
    is_first, is_last = np.diff(table.update, prepend=-1) != 0, np.diff(table.update, append=-1) != 0
    columns = table.worker, table.read, table.update, table.chunk, table.staleness, is_first, is_last
    of_update = sizes[table.update], means[table.update]
    rows = [GradientRow(*values) for values in zip(*(x.tolist() for x in (*columns, *of_update)), strict=True)]
    ends = np.searchsorted(table.step, np.arange(1, table.step[-1] + 2)).tolist()
    return [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def is_grouped(table: UpdateTable) -> bool:
    """Return whether some update combines several gradients."""
    return len(table.update) > table.num_updates


def needs_earlier_batches(table: UpdateTable, step: int) -> bool:
    """Return whether gradients from that step on use batches of earlier steps, as in the tables of live runs."""
    return bool((table.chunk[table.step >= step] < step * table.num_workers).any())


def batches_in_flight(table: UpdateTable, step: int) -> int:
    """Return the number of the last batches before a step with a gradient that is not in the weights of the server yet.

    It is still to be computed, or it waits for the rest of its update.
    """
    applied = table.step[np.searchsorted(table.update, table.update, side="right") - 1]
    late = table.chunk[(applied >= step) & (table.chunk < step * table.num_workers)]
    return step - int(late.min()) // table.num_workers if len(late) else 0


def last_uses(table: UpdateTable, numbers: DeviceNumbers) -> dict[tuple[int, int], int]:
    """Return {(version, device number): the last update that applies a gradient of that version from that device}."""
    devices = np.take(numbers.of_workers, table.worker)
    uses = zip(table.read.tolist(), devices.tolist(), table.update.tolist(), strict=True)
    return {(read, device): update for read, device, update in uses}


def history_peaks(table: UpdateTable, numbers: DeviceNumbers) -> list[int]:
    """Return for each device the peak number of older versions stashed there."""
    change = np.zeros((numbers.num_devices, table.num_updates + 2), int)
    for (version, device), last in last_uses(table, numbers).items():
        if last > version:
            change[device, version + 1] += 1
            change[device, last + 1] -= 1
    return [int(peak) for peak in change.cumsum(axis=1).max(axis=1)]


def averaging_peaks(table: UpdateTable, numbers: DeviceNumbers) -> list[int]:
    """Return for each device the peak number of averagings of model_average that its workers have not applied yet."""
    ends = np.flatnonzero(np.diff(table.update, append=-1))  # the rows after which an averaging begins
    num_rows = len(table.update)
    change = np.zeros((numbers.num_devices, num_rows + 2), int)
    for worker, device in enumerate(numbers.of_workers):
        rows = np.append(np.flatnonzero(table.worker == worker), num_rows + 1)  # the end: never applied
        taken = rows[np.searchsorted(table.read[rows[:-1]], np.arange(len(ends)), side="right")]
        np.add.at(change[device], ends + 1, 1)
        np.add.at(change[device], taken, -1)
    return [int(peak) for peak in change.cumsum(axis=1).max(axis=1)]
