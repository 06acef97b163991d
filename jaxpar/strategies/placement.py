"""Puts states and batches on the devices of a mesh according to the layouts of a plan. Strategies share this code."""

import contextlib
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpar import layout
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.context import arranged, part_shapes, with_positions
from jaxpar.core.mesh import CONTEXT, DATA, one_at_a_time
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Problem
from jaxpar.launch import processes
from jaxpar.layout import Layout
from jaxpar.models import num_parameters
from jaxpar.models.model import Model, Params
from jaxpar.tasks import Sums

# Lets XLA on CPUs write moments in place. Otherwise it copies them when the step begins, because the new parameters and
# the new moments are computed from them by different instructions.
IN_PLACE: dict[str, Any] = {"xla_cpu_copy_insertion_use_region_analysis": True}
# Let XLA overlap the exchange with the backward pass on GPUs: do not combine the buckets again, as the combined
# collective would wait for the whole backward pass, and schedule collectives to hide their latency.
OVERLAP: dict[str, Any] = {
    f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_reduce", "all_gather", "reduce_scatter")
} | {"xla_gpu_enable_latency_hiding_scheduler": True}

# XLA for GPUs starts a collective about 5 kernels before its result is needed, or on Hopper and Blackwell, by the time
# that it would take within a host. Between hosts it takes longer.
KERNELS_BETWEEN_HOSTS = 30
ESTIMATED = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# Other instructions are not estimated in another unit, and XLA does not warn that the profile lacks them.
ONLY_PROFILE: dict[str, Any] = {
    "xla_gpu_enable_analytical_sol_latency_estimator": False,
    "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
}
MOST_COLLECTIVES = 1000  # of a kind in a program, for which there are estimates

# On CPUs, leave to the library YNNPACK only reductions. XLA's own kernels are faster for large matrix products.
OWN_PRODUCTS: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
LARGE_MODEL = 50_000_000  # parameters from which this was faster (docs/results/cpu/ynnpack.md)


def product_options(model: Model) -> dict[str, Any]:
    """Return the compiler options of the programs with the products of a model."""
    return _own_products() if num_parameters(model) >= LARGE_MODEL else {}


@functools.cache
def _own_products() -> dict[str, Any]:
    return first_known(OWN_PRODUCTS, {})


def first_known(*choices: dict[str, Any]) -> dict[str, Any]:
    """Return the first of these compiler options that this version of XLA knows. Raises RuntimeError without one."""
    for options in choices:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0).lower().compile(options)
            return options
    raise RuntimeError(f"XLA knows none of the options {', '.join(name for one in choices for name in one)}")


@functools.cache
def between_hosts() -> dict[str, Any]:
    """Return the compiler options that let collectives between hosts start earlier.

    A profile has the time of each collective, by the name that XLA gives it, in units of 0.001 kernels. It is encoded
    as XLA's ProfiledInstructionsProto: messages (field 1) of a name (field 1) and a float64 (field 2).
    """

    def field(value: bytes) -> bytes:
        assert len(value) < 128, "a longer one needs two bytes for its length"
        return bytes([1 << 3 | 2, len(value)]) + value

    starts = [f"{kind}-start" for kind in ESTIMATED]
    names = starts + [f"{start}.{number}" for start in starts for number in range(1, MOST_COLLECTIVES)]
    time = bytes([2 << 3 | 1]) + struct.pack("<d", 1000.0 * KERNELS_BETWEEN_HOSTS)
    profile = b"".join(field(field(name.encode()) + time) for name in names)
    return {"fdo_profile": profile} | first_known(ONLY_PROFILE)


def on_all(mesh: Mesh) -> NamedSharding:
    """Return the sharding of values replicated on all devices, such as sums over a batch."""
    return NamedSharding(mesh, PartitionSpec())


def by_replica(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that are split between replicas along dim 0, such as batches."""
    return NamedSharding(mesh, PartitionSpec(DATA))


class BatchPlacement:
    """The placement of a batch: examples are split between replicas, and positions over the context axis."""

    def __init__(self, mesh: Mesh, batch: Mapping[str, Any]):
        """batch: the abstract global batch."""
        self._context = mesh.shape.get(CONTEXT, 1)
        self._shardings = {name: by_replica(mesh) for name in batch}
        shapes = {name: x.shape for name, x in batch.items()}
        if self._context > 1:
            split, parts = NamedSharding(mesh, PartitionSpec(DATA, CONTEXT)), part_shapes(batch, self._context)
            for name in with_positions(batch):
                self._shardings[name] = split
                shapes[name] = (len(batch[name]), parts[name].shape[1] * self._context)
        self.specs = {name: sharding.spec for name, sharding in self._shardings.items()}
        self.abstract = {
            name: jax.ShapeDtypeStruct(shapes[name], x.dtype, sharding=self._shardings[name])
            for name, x in batch.items()
        }
        self._place = batch_placer(mesh, self._shardings)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return the batch on devices, from the examples of this process."""
        return self._place(arranged(batch, self._context) if self._context > 1 else batch)


def batch_placer(
    mesh: Mesh, shardings: Mapping[str, Sharding] = {}
) -> Callable[[Mapping[str, np.ndarray]], dict[str, jax.Array]]:
    """Return a function that builds a batch on devices from the examples of this process's `processes.local_shard`.

    If a replica spans processes, the shards of processes overlap. shardings: of arrays that are not split by replica.
    """
    sharding, num_replicas = by_replica(mesh), mesh.shape[DATA]
    local = processes.local_shard(tuple(mesh.devices.flat), num_replicas, num_replicas)  # the process's replicas

    def on_devices(name: str, x: np.ndarray) -> jax.Array:
        share = len(x) // (local.stop - local.start)

        def rows(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(num_replicas * share)
            return x[(slice(start - local.start * share, stop - local.start * share), *index[1:])]

        shape = num_replicas * share, *x.shape[1:]
        return jax.make_array_from_callback(shape, shardings.get(name, sharding), rows)

    return lambda batch: {name: on_devices(name, x) for name, x in batch.items()}


def evaluator(problem: Problem, mesh: Mesh) -> Callable[[Params, Mapping[str, np.ndarray]], Sums]:
    """Return a function that evaluates parameters on a batch on the host, on all devices of a mesh."""
    everywhere, place = on_all(mesh), batch_placer(mesh)
    evaluate = jax.jit(functools.partial(steps.evaluate, problem), out_shardings=everywhere)
    sums: Callable[..., Sums] = one_at_a_time(evaluate, mesh)
    return lambda params, batch: sums(jax.device_put(params, everywhere), place(batch))


class PlacedState:
    """Converts between the canonical state and its global form, according to the layouts of its parts."""

    def __init__(self, problem: Problem, layouts: Mapping[str, Layout], mesh: Mesh):
        """layouts: the layout of each field of State."""
        parts: Any = [layouts[field] for field in State._fields]
        self._layout = layout.join(State(*parts))
        self._like = states.abstract_state(problem.model, problem.optimizer)
        self.shardings: Any = self._layout.shardings(mesh)  # shardings of the global state between steps
        self.abstract: Any = self._layout.abstract(mesh)  # shapes, dtypes and shardings of the global state

        def init(key: jax.Array) -> Any:
            return self._layout.to_global(states.init(problem.model, problem.optimizer, key))

        self.init = jax.jit(init, out_shardings=self.shardings)  # key -> the global state at step 0
        self._in_step = self._layout.shardings(mesh, in_step=True)
        self._to_canonical = jax.jit(self._layout.to_canonical)

    def from_canonical(self, tree: Canonical, _private: Canonical | None = None) -> State:
        """Return the global form of a canonical state. Its leaves may be NumPy arrays."""
        made: State = self._layout.to_global(states.from_canonical(tree, self._like), np)
        return jax.device_put(made, self.shardings)

    def to_canonical(self, state: State) -> Canonical:
        """Return the canonical form of a global state: where replicas differ, the mean over replicas."""
        if not self._layout.is_canonical:
            state = self._to_canonical(jax.device_put(state, self._in_step))
        return states.to_canonical(state)
