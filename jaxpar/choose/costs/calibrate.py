"""Measures what computation and communication cost on CPU devices, which share the cores of this machine.

Each constant is the median of short programs that run on 1, 2, 4, .. devices. They take turns, so that a slow phase of
the machine affects all of them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.choose.costs.layer_programs import BACKWARD, FORWARD, LayerPrograms
from jaxpar.choose.costs.layers import Layers
from jaxpar.choose.costs.machine import CpuMachine
from jaxpar.cluster import Cluster
from jaxpar.core.ring import sent_of_operand
from jaxpar.core.state import init
from jaxpar.core.step import Problem, batch_weight, gradients
from jaxpar.measure.phases import seconds_in_turn

AXIS = "devices"
LONG, SHORT = 2**20, 2**8  # elements of the vectors that are sent
NUM_REPEATED = 16  # collectives, or clocks, in a program
PASS_ELEMENTS = 2**21  # of the vectors that are added
PASS_BYTES = 3 * 4 * PASS_ELEMENTS  # two are read, one is written
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute")


def calibrate(
    cluster: Cluster,
    devices: Sequence[jax.Device],
    problem: Problem,
    batch: Mapping[str, np.ndarray],
    rounds: int = 15,
) -> CpuMachine:
    """Return the machine with measured constants. A layer computes the batch on several devices at the same time."""
    numbers = [2**e for e in range(len(devices).bit_length()) if 2**e <= len(devices)]
    if numbers[-1] != len(devices):
        numbers.append(len(devices))
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for n in numbers:
        mesh = Mesh(np.asarray(devices[:n]), (AXIS,))
        for name, (function, shape) in _programs(n).items():
            calls[name, n] = on_mesh(function, shape, mesh)
    on_device = LayerPrograms(problem, batch, remat="none").on_devices(batch, devices)
    for n in numbers:
        calls["layer", n] = partial(_at_the_same_time, on_device[:n])
    seconds = seconds_in_turn(calls, rounds)
    collectives = {kind: {n: _line(kind, n, seconds) for n in numbers if n > 1} or {1: (0.0, 0.0)} for kind in KINDS}
    most = numbers[-1]
    clock = max(seconds["clocks", most] - seconds["nothing", most], 0.0) / NUM_REPEATED
    return CpuMachine(
        cluster,
        slowdown={n: seconds["layer", n] / seconds["layer", 1] for n in numbers},
        byte_seconds={n: (seconds["passes", n] - seconds["nothing", n]) / PASS_BYTES for n in numbers},
        collectives=collectives,
        clock_seconds=clock,
        step_seconds={n: seconds["nothing", n] for n in numbers},
    )


def _programs(n: int) -> dict[str, tuple[Callable[[jax.Array], jax.Array], tuple[int, ...]]]:
    """Return the programs of n devices, and the shape of the array that each device has."""
    programs: dict[str, tuple[Callable[[jax.Array], jax.Array], tuple[int, ...]]] = {
        "nothing": (lambda x: x + 1, (SHORT,)),
        "passes": (lambda x: x + 2 * x[::-1], (PASS_ELEMENTS,)),
        "clocks": (_clocks, (SHORT,)),
    }
    if n > 1:
        for kind, collective in collectives(n).items():
            for length in (SHORT, LONG):
                programs[f"{kind} {length}"] = (partial(_repeated, collective), (divisible(length, n),))
    return programs


def collectives(n: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Return a function for each of KINDS, of the vector of a device, whose length n divides."""
    shift = [(i, (i + 1) % n) for i in range(n)]
    return {
        "all-reduce": lambda x: jax.lax.psum(x, AXIS),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True),
        "all-gather": lambda x: jax.lax.all_gather(x, AXIS, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, AXIS, shift),
    }


def divisible(length: int, n: int) -> int:
    """Return the smallest multiple of n that is not below a length."""
    return -(-length // n) * n


def _at_the_same_time(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]  # of different devices


def _clocks(x: jax.Array) -> jax.Array:
    """Run clocks in which a device does nothing."""

    def clock(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        branch = (number + jax.lax.axis_index(AXIS)) % 3
        return jax.lax.switch(branch, [lambda x: x, lambda x: x + 1, lambda x: x * 2], x), None

    return jax.lax.scan(clock, x, jnp.arange(NUM_REPEATED))[0]


def _repeated(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, NUM_REPEATED, lambda _, x: jnp.resize(collective(x), x.shape) * 0.5, x)


def on_mesh(function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], mesh: Mesh) -> Callable[[], Any]:
    """Return a compiled program that applies a function to an array of this shape on each device of a mesh."""
    spec = PartitionSpec(AXIS)
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    whole = np.full((mesh.size * shape[0], *shape[1:]), 0.01, np.float32)
    return partial(run, jax.device_put(whole, jax.NamedSharding(mesh, spec)))


def _line(kind: str, n: int, seconds: Mapping[tuple[str, int], float]) -> tuple[float, float]:
    """Return the seconds of one collective, and of each byte that a device sends."""
    short, long = (
        max(seconds[f"{kind} {size}", n] - seconds["nothing", n], 0.0) / NUM_REPEATED for size in (SHORT, LONG)
    )
    of_byte = (long - short) / (4 * (LONG - SHORT) * sent_of_operand(kind, n))
    return short, max(of_byte, 0.0)


class MeasuredLayers(Layers):
    """Layers on the first device of this machine, measured for two numbers of examples.

    Layers that run one by one can take longer than those of a step. Therefore the gradient of all of them is measured
    with them, in one program, and their times are scaled to add up to its time.
    """

    remats = ("none",)  # each one takes a minute to compile
    cached = (*Layers.cached, "_measured")

    def __init__(
        self, problem: Problem, batch: Mapping[str, Any], sizes: tuple[int, int], repeats: int, started: float = 0.0
    ) -> None:
        """Measure nothing yet. batch: one with the longest examples; repeats: measurements of each layer.

        sizes: the numbers of examples, in ascending order; equal for a batch of one. started: seconds that a program
        takes that computes nothing, which are not a layer's.
        """
        super().__init__(problem)
        self._batch, self._numbers, self._repeats, self._started = batch, sizes, repeats, started

    def seconds(self, size: int, remat: str) -> Sequence[tuple[float, float]]:
        """Return the seconds of the forward and backward pass of each layer."""
        few, many = self._measured(remat)
        share = (size - self._numbers[0]) / max(self._numbers[1] - self._numbers[0], 1)
        seconds = np.maximum(few + share * (many - few), 0.0)
        return [(forward, backward) for forward, backward in seconds.tolist()]

    def _measured(self, remat: str) -> list[np.ndarray]:
        """Return the seconds for each number of examples, [layer, forward or backward]."""
        parts = [{name: x[:number] for name, x in self._batch.items()} for number in self._numbers]
        programs = [LayerPrograms(self.problem, part, remat=remat) for part in parts]
        of_sizes = [one.calls(part) for one, part in zip(programs, parts, strict=True)]
        problem = self.problem._replace(model=self.problem.model.with_remat(remat), accumulation_steps=1)
        state = jax.jit(partial(init, problem.model, optax.identity()))(jax.random.key(0))
        run = jax.jit(lambda state, batch: gradients(problem, state, batch, batch_weight(batch)))
        calls: dict[Hashable, Callable[[], Any]] = {"all": partial(run, state, jax.device_put(dict(parts[-1])))}
        calls |= {(size, key): call for size, of_size in enumerate(of_sizes) for key, call in of_size.items()}
        seconds = seconds_in_turn(calls, self._repeats)
        found = [
            np.array([[seconds[size, (number, phase)] for phase in (FORWARD, BACKWARD)] for number in one.numbers])
            for size, one in enumerate(programs)
        ]
        alone = [np.maximum(of_size - self._started, 0.0) for of_size in found]
        scale = max(seconds["all"] - self._started, 0.0) / alone[-1].sum()
        return [scale * of_size for of_size in alone]
