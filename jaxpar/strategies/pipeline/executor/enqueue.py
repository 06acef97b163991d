"""Programs and arrays on the columns of a mesh, and the hosts that enqueue them: on devices, or only to compile them.

A *column* of the mesh is one index of the stage axis, with all its replicas on the data axis. The columns of a
replicated stage form a *group*; other columns are groups of their own. Arrays have one of four forms, unless the
devices that compute a stage together, or replicas, have parts of them (`Layout.specs`):

    ON_ALL       P()              equal on all devices: parameters, optimizer state, scalars
    DIVIDED      P(None, data)    [m, B, ..] microbatches, whose examples are divided among the replicas
    BY_REPLICA   P(data)          [data] a scalar of each replica
    LOCAL        P(data, stage)   [data, stage, ..] different on each device: activations, stashes, gradients. With
                                  other axes of the mesh, it has dims for them too

A step is one Python function that calls programs and sends arrays through a host. With `DEVICES` it trains. With a
`Compiler`, whose arrays are shapes with shardings, the same function lists the programs of a step, for an audit.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpar.core.mesh import DATA, STAGE
from jaxpar.launch import processes
from jaxpar.layout import Tree

ON_ALL, BY_REPLICA, LOCAL = PartitionSpec(), PartitionSpec(DATA), PartitionSpec(DATA, STAGE)
ENQUEUE_SECONDS = 1e-4  # of the host, to enqueue a program with the arrays of a stage; not measured on GPUs


class MeshColumns:
    """The columns of a mesh, and their groups. groups: the columns of each group, in the order of the stages."""

    def __init__(self, mesh: Mesh, groups: Sequence[Sequence[int]]):
        def submesh(columns: Sequence[int]) -> Mesh:
            return Mesh(mesh.devices[:, list(columns)], mesh.axis_names, axis_types=mesh.axis_types)

        self.mesh, self.groups = mesh, groups
        self.group_of = {column: number for number, group in enumerate(groups) for column in group}  # by column
        self.of_column = [submesh([column]) for column in range(mesh.shape[STAGE])]  # mesh of each column
        self.of_group = [submesh(group) for group in groups]  # mesh of each group

    def split(self, tree: Tree) -> list[Tree]:
        """Return a tree on the whole mesh as it is on each column."""
        return [restricted(tree, column) for column in self.of_column]

    def everywhere(self, of_groups: Sequence[Tree]) -> Tree:
        """Return arrays that are equal on all groups as arrays on the whole mesh, without copying them."""
        sharding = NamedSharding(self.mesh, ON_ALL)
        return jax.tree.map(lambda *parts: _assembled(parts, parts[0].shape, sharding), *of_groups)

    def joined(self, group: int, trees: Sequence[Tree]) -> Tree:
        """Return trees on the columns of a group, in the form LOCAL, as one tree on the group."""
        if len(trees) == 1:
            return trees[0]
        sharding = sharding_on(self.of_group[group], LOCAL)

        def join(*parts: Any) -> Any:
            num_data, _, *rest = parts[0].shape
            return _assembled(parts, (num_data, len(parts), *rest), sharding)

        return jax.tree.map(join, *trees)


def sharding_on(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding of arrays of a form on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*mesh.axis_names) if spec == LOCAL else spec)


def of_microbatches(specs: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Return the specs of microbatches, for those of a batch: of the form DIVIDED, without a context axis."""
    return {name: PartitionSpec(None, *spec) for name, spec in specs.items()}


def without_leading(tree: Tree) -> Tree:
    """Return arrays of the form LOCAL as a device sees them inside `shard_map`: without their leading dims."""
    number = len(jax.sharding.get_abstract_mesh().axis_names)
    return jax.tree.map(lambda x: x.reshape(x.shape[number:]), tree)


def with_leading(tree: Tree) -> Tree:
    """Return arrays with the leading dims of the form LOCAL. The inverse of `without_leading`."""
    number = len(jax.sharding.get_abstract_mesh().axis_names)
    return jax.tree.map(lambda x: x.reshape((1,) * number + x.shape), tree)


def restricted(tree: Tree, mesh: Mesh) -> Tree:
    """Return arrays that are equal on all columns as they are on some of them, without copying them."""

    def of_leaf(x: Any) -> Any:
        return x if x.sharding.mesh == mesh else _assembled([x], x.shape, NamedSharding(mesh, x.sharding.spec))

    return jax.tree.map(of_leaf, tree)


def _assembled(parts: Sequence[Any], shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the array whose shards are those of `parts` on its devices; of shapes, the shape."""
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        arrivals = {call: nbytes for part in parts for call, nbytes in arrivals_of(part).items()}
        return made(jax.ShapeDtypeStruct(shape, parts[0].dtype), sharding, arrivals)
    shards: Mapping[Any, Any] = {shard.device: shard.data for part in parts for shard in part.addressable_shards}
    in_order = [shards[device] for device in sharding.mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, in_order, dtype=parts[0].dtype)


class Program(NamedTuple):
    """A jitted function on the devices of one mesh."""

    jitted: Any  # the function
    mesh: Mesh  # the mesh
    kinds: tuple[str, ...]  # for an audit, the kind of bytes in each argument, such as parameters
    is_action: bool = False  # whether a call is an action of the table


def program_on(
    mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any, kinds: tuple[str, ...], **options: Any
) -> Program:
    """Jit a function over a mesh. `function` gets what a device holds of its arguments. options: of `jax.jit`."""
    in_specs, out_specs = jax.tree.map(lambda spec: sharding_on(mesh, spec).spec, (in_specs, out_specs))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return Program(jax.jit(mapped, **options), mesh, kinds)


class Host:
    """A host, through which a step calls programs and sends arrays. It waits for none of them."""

    def call(self, program: Program, *args: Any) -> Any:
        """Enqueue a program, and return its results."""
        return program.jitted(*args)

    def send(self, tree: Tree, sharding: NamedSharding) -> Any:
        """Return arrays on other devices."""
        if jax.process_count() == 1:
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda x: _sent_between_processes(x, sharding), tree)


DEVICES = Host()


def _sent_between_processes(x: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Send the shards of an array one by one. Every process calls this for the same arrays in the same order.

    x: an array of one of the four forms, or a host array, which all processes have.
    """
    if not isinstance(x, jax.Array):
        return processes.put_on_devices(x, sharding)
    assert isinstance(x.sharding, NamedSharding)
    from_mesh, shards = x.sharding.mesh.devices, {shard.device: shard.data for shard in x.addressable_shards}
    own, shape, parts = jax.process_index(), x.sharding.shard_shape(x.shape), []
    for (replica, column, *rest), device in np.ndenumerate(sharding.mesh.devices):
        sender = from_mesh[replica, column % from_mesh.shape[1], *rest]
        if sender.process_index == device.process_index == own:
            parts.append(jax.device_put(shards[sender], device))
        elif sender.process_index != device.process_index:
            # The processes number these transfers, so that all of them must take part in each.
            local, on_sender = [shards[sender]] if sender in shards else [], SingleDeviceSharding(sender)
            shard = jax.make_array_from_single_device_arrays(shape, on_sender, local, dtype=x.dtype)
            sent = jax.device_put(shard, SingleDeviceSharding(device))
            parts += [sent] if device.process_index == own else []
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts, dtype=x.dtype)


class CallInput(NamedTuple):
    """Inputs of a call that an earlier call made."""

    call: int  # number of the earlier call
    nbytes: int  # bytes that were sent to each device of the later one
    by_dtype: Mapping[str, int] = {}  # these bytes by the NumPy name of the dtype


class ProgramCall(NamedTuple):
    """One run of a program in a step."""

    number: int  # its place in the order in which the host enqueues the calls of a step
    inputs: tuple[CallInput, ...]  # its inputs that earlier calls of the step made


class Called(NamedTuple):
    """A compiled program, and its calls in a step."""

    program: Program
    compiled: jax.stages.Compiled
    results: Any  # shapes with shardings
    calls: tuple[ProgramCall, ...]


class Made(jax.ShapeDtypeStruct):
    """The shape of an array that calls of a step made. arrivals: bytes that were sent to a device since, by call."""

    __slots__ = ("arrivals",)
    arrivals: Mapping[int, int]


def made(x: Any, sharding: Sharding, arrivals: Mapping[int, int]) -> Made:
    """Return the shape of x with a sharding, and the bytes that were sent to a device since it was made."""
    shape = Made(x.shape, x.dtype, sharding=sharding)  # type: ignore[no-untyped-call]
    shape.arrivals = arrivals
    return shape


def arrivals_of(x: Any) -> Mapping[int, int]:
    """Return `Made.arrivals`; empty for an array that no call of the step made."""
    return x.arrivals if isinstance(x, Made) else {}


class Compiler(Host):
    """Compiles each program when it is called for the first time, and lists the calls of a step."""

    def __init__(self) -> None:
        self.called: dict[Any, Called] = {}  # the programs, in the order of their first calls
        self._num_calls = self._first = 0

    def begin_step(self) -> None:
        """Forget the calls of the steps before. Inputs that they made have negative numbers."""
        self.called = {key: called._replace(calls=()) for key, called in self.called.items()}
        self._first = self._num_calls

    def call(self, program: Program, *args: Any) -> Any:
        """Return the shapes of the results."""
        key = id(program.jitted), jax.tree.structure(args)
        if key not in self.called:
            lowered = program.jitted.lower(*args)
            compiled = lowered.compile()
            shardings = compiled.output_shardings
            results = jax.tree.map(lambda x, sharding: made(x, sharding, {}), lowered.out_info, shardings)
            self.called[key] = Called(program, compiled, results, ())
        arrived: dict[int, Counter[str]] = {}
        for x in jax.tree.leaves(args):
            for one, nbytes in arrivals_of(x).items():
                arrived.setdefault(one, Counter())[x.dtype.name] += nbytes
        number, called = self._num_calls, self.called[key]
        self._num_calls += 1
        inputs = tuple(CallInput(one - self._first, sum(of.values()), of) for one, of in arrived.items())
        call = ProgramCall(number - self._first, inputs)
        self.called[key] = called._replace(calls=(*called.calls, call))
        return jax.tree.map(lambda x: made(x, x.sharding, {number: 0}), called.results)

    def send(self, tree: Tree, sharding: NamedSharding) -> Any:
        """Return the same shapes with another sharding."""

        def of_leaf(x: Any) -> Made:
            is_there = isinstance(x, Made) and x.sharding.device_set == sharding.device_set
            received = 0 if is_there else math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
            return made(x, sharding, {call: nbytes + received for call, nbytes in arrivals_of(x).items()})

        return jax.tree.map(of_leaf, tree)
