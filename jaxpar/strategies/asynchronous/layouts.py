"""The devices of workers and server, the weights that they hold and send, and the layouts of all arrays, by number.

The workers' devices come first, and workers are assigned to them round-robin. The server is on one of these devices, or
on the next one. Each array is on single devices:

    both kinds   step, key: on the server's device
    a server     params, optimizer, waiting, mitigations: also on the server's device;
                 copies of the newest weights: on the other devices of workers; history: older weights, at their peak
    local        params, optimizer, mitigations: a tuple of each worker's, on its device; outer: on the server's device;
                 averages: corrections of averagings that workers have not applied yet, at their peak

The number of trees in history and averages changes during a run. Their layouts are tuples of trees; tree i is on the
devices that hold more than i trees at their peak.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import optax

from jaxpar import layout
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.state import State
from jaxpar.layout import Layout, Tree
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.table import UpdateTable


class DeviceNumbers(NamedTuple):
    """Device numbers of workers and server, known before there are devices."""

    num_workers: int  # number of workers of the run
    num_devices: int  # number of the workers' devices
    server: int  # number of the server's device

    def of_worker(self, worker: int) -> int:
        """Return the number of a worker's device."""
        return worker % self.num_devices

    @property
    def of_workers(self) -> list[int]:
        """Number of each worker's device."""
        return [self.of_worker(worker) for worker in range(self.num_workers)]

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes over the workers' devices, and the server's device if it is a separate one."""
        return {DATA: max(self.num_devices, self.server + 1), STAGE: 1}


def trees_sent(updates: UpdateTable | None, mitigations: Mitigations, numbers: DeviceNumbers, *, local: bool) -> float:
    """Return the number of trees as large as the parameters that are sent between devices in a step.

    updates: None if workers are live; local: whether workers send each other their local weights, not gradients.
    """
    num_remote = sum(device != numbers.server for device in numbers.of_workers)
    if updates is None:
        return num_remote * (3 if mitigations.needs_read else 2)
    num_steps = int(updates.step[-1]) + 1
    if local:
        return 2 * num_remote * updates.num_updates / num_steps
    # Each version of the weights is sent to a device once. A gradient is sent together with the weights that it was
    # computed from if a mitigation needs them.
    worker_devices = np.take(numbers.of_workers, updates.worker)
    reads = np.stack([updates.read, worker_devices])[:, worker_devices != numbers.server]
    gradients = reads.shape[1] * (2 if mitigations.needs_read else 1)
    return (np.unique(reads, axis=1).shape[1] + gradients) / num_steps


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
    return change.cumsum(axis=1).max(axis=1).tolist()


def averaging_peaks(table: UpdateTable, numbers: DeviceNumbers) -> list[int]:
    """Return for each device the peak number of averagings of model_average that its workers have not applied yet."""
    begins = np.flatnonzero(table.is_last) + 1  # the rows before which an averaging begins
    num_rows = len(table.update)
    change = np.zeros((numbers.num_devices, num_rows + 2), int)
    for worker, device in enumerate(numbers.of_workers):
        rows = np.append(np.flatnonzero(table.worker == worker), num_rows + 1)  # the end: never applied
        taken = rows[np.searchsorted(table.read[rows[:-1]], np.arange(len(begins)), side="right")]
        np.add.at(change[device], begins, 1)
        np.add.at(change[device], taken, -1)
    return change.cumsum(axis=1).max(axis=1).tolist()


def layouts_on_server(like: State, numbers: DeviceNumbers) -> dict[str, Layout]:
    """Return the layouts of the canonical state on the server's device, from which a run starts. like: abstract."""
    return {part: layout.on_one(numbers.axes, tree, DATA, numbers.server) for part, tree in like._asdict().items()}


def server_layouts(
    like: State, mitigations: Mitigations, updates: UpdateTable | None, numbers: DeviceNumbers
) -> dict[str, Layout]:
    """Return the layouts of workers and a server. Live workers may have read different versions of the weights."""
    axes = numbers.axes
    on_server = partial(layout.on_one, axes, axis=DATA, number=numbers.server)
    others = [device for device in range(numbers.num_devices) if device != numbers.server]
    if updates is None:
        history = [numbers.of_workers.count(device) for device in range(axes[DATA])]
        history[numbers.server] = numbers.num_workers
    else:
        history = history_peaks(updates, numbers)
    return {
        **layouts_on_server(like, numbers),
        "copies": layout.on_some(axes, like.params, DATA, others),
        "history": _at_their_most(axes, like.params, history),
        "waiting": on_server(like.params if updates is not None and updates.is_grouped else ()),
        "mitigations": on_server(jax.eval_shape(mitigations.init, like.params)),
    }


def local_layouts(
    like: State,
    mitigations: Mitigations,
    updates: UpdateTable,
    numbers: DeviceNumbers,
    *,
    outer: optax.GradientTransformation | None,
    waits: bool,
) -> dict[str, Layout]:
    """Return the layouts of workers with local weights. outer, waits: as in `LocalEngine`."""
    axes = numbers.axes
    on_server = partial(layout.on_one, axes, axis=DATA, number=numbers.server)

    def by_worker(tree: Tree) -> Layout:
        return layout.join(tuple(layout.on_one(axes, tree, DATA, device) for device in numbers.of_workers))

    return {
        "step": on_server(like.step),
        "key": on_server(like.key),
        "params": by_worker(like.params),
        "optimizer": by_worker(like.optimizer),
        "mitigations": by_worker(jax.eval_shape(mitigations.init, like.params)),
        "outer": on_server(() if outer is None else (like.params, jax.eval_shape(outer.init, like.params))),
        "averages": _at_their_most(axes, like.params, [] if waits else averaging_peaks(updates, numbers)),
    }


def _at_their_most(axes: dict[str, int], like: Tree, counts: Sequence[int]) -> Layout:
    """Return the layout of a tuple of trees. counts: the peak number of trees on each device."""
    holders = [[device for device, count in enumerate(counts) if count > i] for i in range(max(counts, default=0))]
    return Layout(axes, tuple(layout.on_some(axes, like, DATA, numbers).leaves for numbers in holders))
