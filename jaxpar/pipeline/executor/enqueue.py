"""Programs of a dispatched pipeline, and the hosts that enqueue them: on devices, or only to compile them from shapes.

A step is one Python function that calls programs and sends arrays through a host. With `DEVICES` it trains. With a
`Compiler`, whose arrays are shapes with shardings, the same function lists the programs of a step, for an audit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh, Sharding

from jaxpar.layout import Tree


class Program(NamedTuple):
    """A jitted function on the devices of one mesh.

    Attributes:
      jitted: the function.
      mesh: the mesh.
      kinds: for an audit, the kind of bytes in each argument, such as parameters.
    """

    jitted: Any
    mesh: Mesh
    kinds: tuple[str, ...]


def program_on(
    mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any, kinds: tuple[str, ...], **options: Any
) -> Program:
    """Jit a function over a mesh. `function` gets what a device holds of its arguments. options: of `jax.jit`."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return Program(jax.jit(mapped, **options), mesh, kinds)


class Host(Protocol):
    """A host, through which a step calls programs and sends arrays."""

    def call(self, program: Program, *args: Any) -> Any:
        """Enqueue a program, and return its results."""

    def send(self, tree: Tree, sharding: Sharding) -> Any:
        """Return arrays on other devices."""


class _Devices:
    """Enqueues programs on their devices, and waits for none of them."""

    def call(self, program: Program, *args: Any) -> Any:
        return program.jitted(*args)

    def send(self, tree: Tree, sharding: Sharding) -> Any:
        return jax.device_put(tree, sharding)


DEVICES = _Devices()


class Called(NamedTuple):
    """A compiled program, and how often a step runs it."""

    program: Program
    compiled: jax.stages.Compiled
    results: Any  # shapes with shardings
    runs: int


class Compiler:
    """Compiles each program when it is called for the first time, and counts the calls.

    Attributes:
      called: the programs, in the order of their first calls.
    """

    def __init__(self) -> None:
        self.called: dict[int, Called] = {}

    def call(self, program: Program, *args: Any) -> Any:
        """Return the shapes of the results."""
        key = id(program.jitted)
        if key not in self.called:
            lowered = program.jitted.lower(*args)
            compiled = lowered.compile()
            results = jax.tree.map(_with_sharding, lowered.out_info, compiled.output_shardings)
            self.called[key] = Called(program, compiled, results, 0)
        called = self.called[key]
        self.called[key] = called._replace(runs=called.runs + 1)
        return called.results

    def send(self, tree: Tree, sharding: Sharding) -> Any:
        """Return the same shapes with another sharding."""
        return jax.tree.map(lambda x: _with_sharding(x, sharding), tree)


def _with_sharding(x: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
