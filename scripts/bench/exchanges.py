"""Measures bytes, memory and time of exchanges, relative to theory and to each other.

scripts/python scripts/bench/exchanges.py [--results=bytes,memory,ring,compress,steps] [--config=configs/quickstart.py]
[--replicas=4] [--rounds=20] [--config.KEY=VALUE ...]

bytes     bytes that a device sends per step in the compiled program / in theory, and theory / theory of ddp
memory    bytes of parameters and optimizer state on the fullest device, in the compiled program / by their formula
ring      time to reduce 25 MiB with our ring or with push and pull / with XLA's all-reduce (psum)
compress  time to encode and decode 25 MiB / time to copy it
steps     time of a step / time of a ddp step, on the same batch and cores, for every exchange and for every
          config.data_parallel.implementation of ddp
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import data, strategies, tasks
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from jaxpar.exchange import EXCHANGES, compress, reduce
from jaxpar.inspect import audit
from jaxpar.measure.phases import seconds_in_turn
from scripts.bench.steps import Contender, make_problem, race
from scripts.bench.tables import show

RESULTS = ("bytes", "memory", "ring", "compress", "steps")
SIZE = 25 * 2**20 // 4  # elements
COMPRESSORS = {
    "MinMaxUInt8, a range per 4096": compress.min_max_uint8(4096),
    "onebit, a scale per 2048": compress.onebit(block=2048),
    "onebit with error feedback": compress.error_feedback(compress.onebit(block=2048)),
    "dithering": compress.dithering(127),
    "topk 1%": compress.topk(0.01),
    "randomk 5%": compress.randomk(0.05),
}
WAYS = ("shard_map", "sharding", "pmap")


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--results", type=names(RESULTS), default=list(RESULTS), help="results to measure (default: all)"
    )
    parser.add_argument("--config", default="configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--replicas", type=integer(1), default=4, help="number of replicas")
    parser.add_argument("--rounds", type=integer(1), default=20, help="number of repetitions")
    arguments, overrides = parser.parse_with_overrides()
    overrides += [f"--config.mesh.{key}={arguments.replicas}" for key in ("data", "virtual_cpu_devices")]
    config = configs.load_config(arguments.config)
    configs.override(config, overrides)
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    there = clusters.find_cluster()
    print(f"{arguments.config}, {there.num_devices} {there.device_kind} devices")
    results = arguments.results
    if {"bytes", "memory", "steps"} & set(results):
        with tempfile.TemporaryDirectory() as folder:
            dataset = data.load(config, tasks.find_task(config).labels, Path(folder))
        batch = data.Batches(dataset.train, batch_size=config.batch_size, seed=0, shuffle=True).batch(0)

        def build(name: str, *more: str) -> strategies.Strategy[Any]:
            variant: ConfigDict = configs.load_config(arguments.config)
            by = "--config.data_parallel.implementation=shard_map"
            configs.override(variant, [*overrides, f"--config.exchange={name}", by, *more])
            strategies.decide(variant, there)
            return strategies.make(variant, make_problem(variant, dataset.info, batch))

        if {"bytes", "memory"} & set(results):
            task = tasks.find_task(config)
            rows = bytes_and_memory(build, task, arguments.replicas, "bytes" in results, "memory" in results)
            show(["exchange", "bytes sent / formula", "formula / that of `ddp`", "bytes of state / formula"], rows)
        if "steps" in results:
            steps(build, batch, arguments.rounds)
    blocks = ring(arguments.replicas, arguments.rounds) if "ring" in results else []
    blocks += round_trips(arguments.rounds) if "compress" in results else []
    if blocks:
        show(["operation on 25 MiB", "time / reference", "reference"], blocks)


def bytes_and_memory(
    build: Callable[..., strategies.Strategy[Any]], task: tasks.Task, n: int, has_bytes: bool, has_memory: bool
) -> Iterator[list[str]]:
    """Measure the results `bytes` and `memory`."""
    ddp = build("ddp").plan
    parameters, optimizer = ddp.memory[0]["parameters"], ddp.memory[0]["optimizer"]
    for name in EXCHANGES:
        strategy = build(name)
        plan, programs = strategy.plan, strategy.compile()
        sent = state = ""
        if has_bytes:
            rows = audit.audit(programs, plan, task)
            total = sum(row.nbytes for row in rows if row.dtype != audit.SCALARS)
            sent = f"{total / plan.wire_bytes:.4f}" if total else "copies"
        if has_memory and name.startswith("zero"):
            formula = (parameters + optimizer) / n
            devices = audit.memory(programs, strategy)
            fullest = max(
                sum(part.nbytes or 0 for part in parts.values() if part.theory is not None) for parts in devices
            )
            state = f"{fullest / formula:.4f}"
        yield [name, sent, f"{plan.wire_bytes / ddp.wire_bytes:.4f}", state]


def steps(build: Callable[..., strategies.Strategy[Any]], batch: Any, rounds: int) -> None:
    """Measure the result `steps`."""
    contenders: dict[str, Contender] = {name: build(name) for name in EXCHANGES}
    contenders |= {f"ddp by {way}": build("ddp", f"--config.data_parallel.implementation={way}") for way in WAYS[1:]}
    timings = race(contenders, batch, rounds=rounds)
    rows = [[name, f"{timing.seconds / timings['ddp'].seconds:.3f}"] for name, timing in timings.items()]
    show(["exchange", "step time / that of `ddp`"], rows)


def ring(n: int, rounds: int) -> list[list[str]]:
    """Measure the result `ring`."""
    axis, on = reduce.Axis(mesh.DATA, n), mesh.make_mesh({mesh.DATA: n, mesh.STAGE: 1}, clusters.devices())
    spec = PartitionSpec(mesh.DATA)
    x = jax.device_put(jnp.ones((n, SIZE)), jax.sharding.NamedSharding(on, spec))

    def mapped(reducer: reduce.Reducer) -> Callable[[], Any]:
        def mean(x: jax.Array) -> jax.Array:
            return reducer.mean(x[0], reducer.init(SIZE, jax.random.key(0)))[0][None]

        compiled = jax.jit(jax.shard_map(mean, mesh=on, in_specs=spec, out_specs=spec, check_vma=False))
        return partial(compiled, x)

    ways = {"psum": reduce.psum, "ring": reduce.ring, "push_pull": reduce.push_pull}
    times = seconds_in_turn({name: mapped(make(axis)) for name, make in ways.items()}, rounds)
    return [[name, f"{seconds / times['psum']:.3f}", "psum"] for name, seconds in times.items() if name != "psum"]


def round_trips(rounds: int) -> list[list[str]]:
    """Measure the result `compress`."""
    x = jax.random.normal(jax.random.key(0), (SIZE,))

    def round_trip(compressor: compress.Compressor, x: jax.Array, state: Any) -> Any:
        payload, state = compressor.encode(x, state)
        return compressor.decode(payload, SIZE), state

    calls: dict[str, Callable[[], Any]] = {"copy": partial(jax.jit(jnp.copy), x)}
    for name, compressor in COMPRESSORS.items():
        calls[name] = partial(jax.jit(partial(round_trip, compressor)), x, compressor.init(SIZE, jax.random.key(1), 0))
    times = seconds_in_turn(calls, rounds)
    return [[name, f"{seconds / times['copy']:.2f}", "copy"] for name, seconds in times.items() if name != "copy"]


if __name__ == "__main__":
    sys.exit(exit_code(main))
