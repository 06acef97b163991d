"""Compares the bytes in plans, by device and kind, with the arrays that engines hold."""

from typing import Any

import jax
import pytest

from jaxpar import cluster
from jaxpar.strategies.asynchronous.server import ServerRun
from jaxpar.strategies.asynchronous.virtual_time import VirtualTime
from tests.strategies.asynchronous.test_engines import RANDOM, asynchronous
from tests.strategies.pipelines import NUM_STEPS, Task, make, make_batch, start

MLP = Task("mlp", "classification", layers=1)
PEAKS = ("history", "averages")  # their number changes during a run
CASES: dict[str, tuple[tuple[str, ...], int, int]] = {  # settings, workers, devices
    "sync": (("policy=sync",), 8, 2),
    "async": (("policy=async", "mitigations=adaptive_dc_asgd,staleness_aware"), 8, 4),
    "server on a separate device": (("policy=softsync", "mitigations=adaptive_dc_asgd"), 4, 5),
    "local_sgd": (("policy=local_sgd", "interval=2"), 8, 4),
    "diloco": (("policy=diloco", "interval=2"), 8, 2),
    "model_average": (("policy=model_average", "interval=2"), 8, 4),
}


def by_device(tree: Any, num_devices: int) -> list[int]:
    """Return the bytes of a tree's arrays on each device."""
    nbytes, devices = [0] * num_devices, cluster.devices()
    for leaf in jax.tree.leaves(tree):
        [device] = leaf.devices()
        nbytes[devices.index(device)] += leaf.nbytes
    return nbytes


def arrays(state: Any) -> dict[str, Any]:
    """Return the arrays of a run by kind, except those of PEAKS."""
    if isinstance(state, ServerRun):
        server = state.server
        return {"optimizer": server.optimizer, "waiting": server.waiting, "mitigations": server.mitigations}
    return {"parameters": state.params, "optimizer": [one.optimizer for one in state.servers], "outer": state.outer}


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_an_initialised_engine(name: str) -> None:
    settings, workers, devices = CASES[name]
    strategy = make(MLP, *asynchronous(*settings, *RANDOM, workers=workers, devices=devices))
    memory = strategy.plan.memory
    state = strategy.from_canonical(start(MLP))
    trees = arrays(state)
    for kind, tree in trees.items():
        assert [parts.get(kind, 0) for parts in memory] == by_device(tree, len(memory)), kind
    kinds = {kind for parts in memory for kind in parts}
    assert kinds - set(PEAKS) - {"parameters"} == {
        kind for kind in trees if sum(by_device(trees[kind], len(memory)))
    } - {"parameters"}
    if isinstance(state, ServerRun):  # each device has the newest weights or a copy of them
        [size] = {sum(by_device(state.params, len(memory)))}
        assert [parts["parameters"] for parts in memory] == [size] * len(memory)


@pytest.mark.parametrize("devices", [1, 3])
def test_the_history_at_its_peak(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes after every update never exceed the plan's on any device, and reach it at some point."""
    peaks, publish = [0] * devices, VirtualTime.publish

    def measured(self: VirtualTime, params: Any) -> None:
        publish(self, params)
        now = by_device(list(self.history.values()), devices)
        peaks[:] = map(max, peaks, now)

    monkeypatch.setattr(VirtualTime, "publish", measured)
    settings = asynchronous("policy=async", *RANDOM, workers=6, devices=devices)
    strategy = make(MLP, *settings, "--config.batch_size=24")
    state = strategy.from_canonical(start(MLP))
    for step in range(NUM_STEPS):
        state, _ = strategy.step(state, make_batch(MLP, step, 24))
    assert [parts["history"] for parts in strategy.plan.memory] == peaks
    assert min(peaks) > 0
