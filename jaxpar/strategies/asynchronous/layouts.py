"""Layouts of the arrays of asynchronous training, leaf by leaf. Arrays are on single devices, given by number.

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

import jax
import optax

from jaxpar import layout
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.state import State
from jaxpar.layout import Layout, Tree
from jaxpar.strategies.asynchronous.device_numbers import DeviceNumbers
from jaxpar.strategies.asynchronous.gradient_rows import averaging_peaks, history_peaks, is_grouped
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.table import UpdateTable


def layouts_on_server(like: State, numbers: DeviceNumbers) -> dict[str, Layout]:
    """Return the layouts of the canonical state on the server's device, from which a run starts. like: abstract."""
    axes = _axes(numbers)
    return {part: layout.on_one(axes, tree, DATA, numbers.server) for part, tree in like._asdict().items()}


def server_layouts(
    like: State, mitigations: Mitigations, updates: UpdateTable | None, numbers: DeviceNumbers
) -> dict[str, Layout]:
    """Return the layouts of workers and a server.

    Args:
      like: the state, abstract.
      mitigations: against staleness.
      updates: the table; None: workers are live, and each may have read a different version.
      numbers: device numbers of workers and server.
    """
    axes = _axes(numbers)
    on_server = partial(layout.on_one, axes, axis=DATA, number=numbers.server)
    others = [device for device in range(numbers.num_devices) if device != numbers.server]
    if updates is None:
        history = [numbers.of_workers.count(device) for device in range(axes[DATA])]
        history[numbers.server] = numbers.num_workers
    else:
        history = history_peaks(updates, numbers)
    has_waiting = updates is not None and is_grouped(updates)
    return {
        **layouts_on_server(like, numbers),
        "copies": layout.on_some(axes, like.params, DATA, others),
        "history": _at_their_most(axes, like.params, history),
        "waiting": on_server(like.params if has_waiting else ()),
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
    """Return the layouts of workers with local weights.

    Args:
      like: the state, abstract.
      mitigations: against staleness.
      updates: the table.
      numbers: device numbers of the workers and of the state that they share.
      outer: the outer optimizer of diloco; None for other policies.
      waits: whether workers wait for each other when they synchronize: true for all policies except model_average.
    """
    axes = _axes(numbers)
    on_server = partial(layout.on_one, axes, axis=DATA, number=numbers.server)

    def by_worker(tree: Tree) -> Layout:
        return layout.join(tuple(layout.on_one(axes, tree, DATA, device) for device in numbers.of_workers))

    outer_state = () if outer is None else (like.params, jax.eval_shape(outer.init, like.params))
    averages = [] if waits else averaging_peaks(updates, numbers)
    return {
        "step": on_server(like.step),
        "key": on_server(like.key),
        "params": by_worker(like.params),
        "optimizer": by_worker(like.optimizer),
        "mitigations": by_worker(jax.eval_shape(mitigations.init, like.params)),
        "outer": on_server(outer_state),
        "averages": _at_their_most(axes, like.params, averages),
    }


def _axes(numbers: DeviceNumbers) -> dict[str, int]:
    """Return the mesh axes over the workers' devices, and the server's device if it is a separate one."""
    return {DATA: max(numbers.num_devices, numbers.server + 1), STAGE: 1}


def _at_their_most(axes: dict[str, int], like: Tree, counts: Sequence[int]) -> Layout:
    """Return the layout of a tuple of trees. counts: the peak number of trees on each device."""
    holders = [[device for device, count in enumerate(counts) if count > i] for i in range(max(counts, default=0))]
    return Layout(axes, tuple(layout.on_some(axes, like, DATA, numbers).leaves for numbers in holders))
