"""Tests plans of every strategy for a cluster that is not available, made in a process where using a device fails."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar import cluster, layout, strategies
from jaxpar.cluster import Link
from jaxpar.config import default_config
from jaxpar.core.plan import ON_HOST, Decision, Plan, Traffic, state_memory
from jaxpar.core.state import nbytes
from jaxpar.errors import UserError
from jaxpar.exchange import EXCHANGES
from jaxpar.models import Model
from jaxpar.strategies.fits import check_memory
from tests.strategies.pipelines import Task, make_config, make_problem, pipeline

ROOT = Path(__file__).parents[2]
NUM_DEVICES = 64
PIPELINE = ["strategy=pipeline", "mesh.stage=8", "model.num_layers=14"]
# name -> overrides of the default config. A test below fails if a strategy or an exchange is missing.
CASES = {
    "single": ["strategy=single"],
    "sharding": ["strategy=data_parallel"],
    "pmap": ["strategy=data_parallel", "data_parallel.implementation=pmap"],
    **{f"exchange {name}": ["strategy=data_parallel", f"exchange={name}"] for name in EXCHANGES},
    "offload": ["strategy=data_parallel", "exchange=zero2", "exchange_options.offload=True"],
    "1f1b": [*PIPELINE, "pipeline.schedule=1f1b", "pipeline.num_microbatches=8"],
    "zb_h1 onebit": [*PIPELINE, "pipeline.schedule=zb_h1", "pipeline.num_microbatches=8", "exchange=byteps_onebit"],
    "muon": [*PIPELINE, "optimizer.name=muon", "pipeline.schedule=1f1b", "pipeline.num_microbatches=8"],
    "async": ["strategy=async_data_parallel", "asynchronous.num_workers=32"],
    "diloco": ["strategy=async_data_parallel", "asynchronous.num_workers=64", "asynchronous.policy=diloco"],
    "live": ["strategy=async_data_parallel", "asynchronous.num_workers=32", "asynchronous.mode=live"],
    "swarm": ["strategy=swarm", "swarm.peers=64", "swarm.delayed=True"],
}
# The models have bfloat16 layers and cuDNN attention, which is not installed here.
# JAX_PLATFORMS is set to a platform that does not exist, so any use of a device or an array fails.
PROGRAM = """
import json, sys
import jax
import numpy as np
from jaxpar import cluster, config, models, strategies, tasks
from jaxpar.core import optimizer
from jaxpar.core.step import Problem
from jaxpar.data import DataInfo

NUM_STEPS, ROWS, LENGTH = 10, 1024, 16
target = cluster.named_cluster("H100", {num_devices}, num_processes={num_devices} // 8)
info = DataInfo("text", (LENGTH,), 5, tuple("abcde"), 64, 0)
batch = {{
    "inputs": jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32),
    "mask": jax.ShapeDtypeStruct((ROWS, LENGTH), bool),
    "labels": jax.ShapeDtypeStruct((ROWS,), np.int32),
    "weights": jax.ShapeDtypeStruct((ROWS,), np.float32),
    "index": jax.ShapeDtypeStruct((ROWS,), np.int32),
}}
made = {{}}
for name, overrides in json.loads(sys.argv[1]).items():
    c = config.default_config()
    base = f"batch_size={{ROWS}}", "model.hidden_size=64", "model.dtype=bfloat16", "pipeline.executor=lockstep"
    config.override(c, [f"--config.{{override}}" for override in (*base, *overrides)])
    one_process = c.strategy in ("single", "async_data_parallel", "swarm") or c.exchange == "dp" or "pmap" in name
    on = cluster.named_cluster("H100", {num_devices}) if one_process else target
    rule = optimizer.make_optimizer(c, optimizer.build_learning_rate(c, NUM_STEPS))
    task = tasks.find_task(c)
    problem = Problem(models.build(c, info, on), rule, c.optimizer.accumulation_steps, batch, NUM_STEPS, task)
    plan = strategies.plan(c, problem, on)
    made[name] = {{
        "strategy": plan.strategy,
        "axes": plan.axes,
        "num_devices": plan.num_devices,
        "memory": [dict(parts) for parts in plan.memory],
        "sent": plan.sent_by_axis(),
        "key": dict(plan.private_key),
        "in_flight": strategies.in_flight_bytes(plan, problem),
        "params": sum(leaf.size * 4 for leaf in jax.tree.leaves(problem.model.shapes)),
    }}
try:
    jax.devices()
except RuntimeError:
    print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, object]]:
    """The plans of all cases, made in a process without devices."""
    program = PROGRAM.format(num_devices=NUM_DEVICES)
    environment = {**os.environ, "JAX_PLATFORMS": "none", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_every_strategy_is_planned(plans: dict[str, dict[str, object]]) -> None:
    assert {plan["strategy"] for plan in plans.values()} == set(strategies.STRATEGIES)


def test_only_private_state_has_a_key(plans: dict[str, dict[str, object]]) -> None:
    """Residuals, momentum or an Adam of their own, weights that differ between replicas, and gradients in flight."""
    exchanges = [
        *("byteps_onebit", "byteps_topk", "byteps_randomk", "byteps_dithering", "powersgd", "horovod_adasum"),
        *("onebit_adam", "bagua_qadam"),
        *("bagua_decentralized", "bagua_low_precision_decentralized", "bagua_model_average"),
    ]
    private = {*(f"exchange {name}" for name in exchanges), "zb_h1 onebit", "async", "diloco", "live", "swarm"}
    assert {name for name, plan in plans.items() if plan["key"]} == private


@pytest.mark.parametrize("name", CASES)
def test_a_plan_without_devices(name: str, plans: dict[str, dict[str, object]]) -> None:
    plan = plans[name]
    memory, params = plan["memory"], plan["params"]
    assert isinstance(memory, list)
    assert isinstance(params, int)
    assert isinstance(plan["sent"], dict)
    expected = {"single": 1, "async": 33, "live": 33}.get(name, NUM_DEVICES)
    assert plan["num_devices"] == len(memory) == expected
    held = memory[0]["parameters"]
    in_flight = plan["in_flight"]
    assert isinstance(in_flight, dict)
    assert ("activations" in in_flight) is ("stashes" not in memory[0])
    if name in ("exchange zero1", "exchange zero2", "offload"):  # most in bfloat16
        assert params / 2 < in_flight["gathered parameters"] < 0.6 * params
    else:
        assert "gathered parameters" not in in_flight
    if plan["strategy"] == "pipeline":
        assert plan["axes"] == {"data": 8, "stage": 8}
        assert params / 8 <= held < params / 2
        assert held < memory[0]["optimizer"] + 1
        assert memory[0]["stashes"] > 0
        assert memory[0]["transfers"] > 0
        assert set(plan["sent"]) == {"data", "stage"}
        assert all(of[1] > 0 for of in plan["sent"].values())
    elif "hsdp" in name:  # in 8 groups of 8 devices
        assert params / 8 <= held < 1.5 * params / 8
    elif "zero" in name or name == "offload":
        assert params / NUM_DEVICES <= held < 1.5 * params / NUM_DEVICES
    else:
        assert held == params
    if name in ("sharding", "exchange ddp"):  # the ring's 2 (n - 1) / n, written out
        assert plan["sent"]["data"][0] == pytest.approx(2 * 63 / 64 * params)


def test_a_planner_gets_reasons_as_values() -> None:
    """`possible` returns the reason why a config is refused instead of raising it."""
    task = Task("mlp", "classification")
    config = make_config(task)
    problem = make_problem(config, task)
    config.strategy, config.mesh.data = "data_parallel", 9
    reason = strategies.possible(config, problem, cluster.named_cluster("H100", 8))
    assert isinstance(reason, str)
    assert reason.startswith("config.mesh.data is 9; it must be at most 8, the number of gpu devices")
    config.mesh.data = 8
    assert not isinstance(strategies.possible(config, problem, cluster.named_cluster("H100", 8)), str)


def test_an_exchange_that_does_not_support_the_shapes() -> None:
    task, there = Task("mlp", "classification"), cluster.named_cluster("H100", 2)
    replicas = ("--config.strategy=data_parallel", "--config.mesh.data=2")
    passes = "--config.exchange_options.backward_passes_per_step=3"
    config = make_config(task, *replicas, "--config.exchange=horovod", passes)
    problem = make_problem(config, task)
    assert strategies.possible(config, problem, there) == (
        "config.exchange_options.backward_passes_per_step is 3; it must divide the number of steps, 10"
    )
    # Of the largest array, [192, 16], the factors of rank 7 have 1456 elements, less than half of its 3072.
    config = make_config(task, *replicas, "--config.exchange=powersgd", "--config.exchange_options.rank=8")
    assert strategies.possible(config, problem, there) == (
        "config.exchange_options.rank is 8; it must be at most 7, or no array of this model is compressed"
    )
    config.exchange_options.rank = 7
    assert not isinstance(strategies.possible(config, problem, there), str)
    stages = (
        "--config.strategy=pipeline",
        "--config.mesh.stage=2",
        "--config.mesh.data=1",
        "--config.pipeline.schedule=1f1b",
    )
    for onebit in (replicas, stages):  # a device of the pipeline packs its smaller arrays into one
        config = make_config(task, *onebit, "--config.exchange=byteps_onebit")
        assert re.fullmatch(
            r"config.exchange_options.min_compress_bytes is 65536; it must be at most \d+, the bytes of the largest "
            "array, or byteps_onebit compresses nothing",
            str(strategies.possible(config, problem, there)),
        )
        config.exchange_options.min_compress_bytes = 192 * 16 * 4
        assert not isinstance(strategies.possible(config, problem, there), str)
    config = make_config(
        task, *replicas, "--config.exchange=bagua_model_average", "--config.exchange_options.interval=11"
    )
    assert strategies.possible(config, problem, there) == (
        "config.exchange_options.interval is 11; it must be at most 10, the number of steps, or the replicas never "
        "exchange anything"
    )
    config = make_config(task, *replicas, "--config.exchange=zero1")
    empty = Model({"empty": lambda rngs: nnx.Linear(0, 3, kernel_init=nnx.initializers.zeros, rngs=rngs)})
    assert strategies.possible(config, problem._replace(model=empty), there) == (
        "config.exchange is 'zero1', which cannot shard ['empty']['kernel'] of shape (0, 3); parameters must not be "
        "empty"
    )


def test_muon_needs_a_kernel_of_a_hidden_layer() -> None:
    task, there = Task("mlp", "classification"), cluster.named_cluster("H100", 1)
    config = make_config(task, "--config.optimizer.name=muon")
    problem = make_problem(config, task)
    assert not isinstance(strategies.possible(config, problem, there), str)
    linear = Model({"embed": lambda rngs: nnx.Linear(3, 2, rngs=rngs)})
    assert strategies.possible(config, problem._replace(model=linear), there) == (
        "config.optimizer.name is 'muon'; it must be one of adamw, lamb, sgd, adafactor, lion with "
        "config.model.name='mlp', none of whose parameters is a kernel of a hidden layer"
    )


def plan_of(*memory: dict[str, int], traffic: Sequence[Traffic] = ()) -> Plan[None]:
    decision = Decision({"data": len(memory), "stage": 1}, 1, "", len(memory), None)
    layouts = {"params": layout.replicated(decision.axes, {"kernel": np.zeros(3, np.float32)})}
    return Plan("data_parallel", decision, "", layouts, None, memory, traffic)


def test_memory_of_a_state_by_device_and_purpose() -> None:
    """Counted by hand: 12 bytes of weights, 2 devices on each of 2 axes."""
    axes, tree = {"data": 2, "stage": 2}, {"kernel": np.zeros(3, np.float32)}
    layouts = {
        "step": layout.replicated(axes, np.zeros((), np.int32)),
        "params": layout.on_one(axes, tree, "stage", 1),
        "copies": layout.on_some(axes, tree, "data", (0, 1)),
        "optimizer": layout.sharded(axes, tree, "data").moved_to_host(),  # padded to 4 elements
        "private": layout.per_replica(axes, {}, "data"),
        "history": layout.on_one(axes, (tree, tree), "data", 1),
    }
    expected = [
        {"parameters": 12, f"optimizer{ON_HOST}": 8},
        {"parameters": 24, f"optimizer{ON_HOST}": 8},
        {"parameters": 12, f"optimizer{ON_HOST}": 8, "history": 24},
        {"parameters": 24, f"optimizer{ON_HOST}": 8, "history": 24},
    ]
    assert state_memory(layouts) == tuple(expected)


def refusal(plan: Plan[None], on: cluster.Cluster) -> str:
    with pytest.raises(UserError) as caught:
        check_memory(plan, on)
    return str(caught.value)


def test_a_plan_that_needs_too_much_memory() -> None:
    parts = {"parameters": 30 * 10**9, "optimizer": 60 * 10**9, "private": 0}
    reason = refusal(plan_of({"parameters": 10**9}, parts), cluster.named_cluster("H100", 2))
    assert reason == (
        "config.strategy is 'data_parallel', which needs 90 GB on device 1 (parameters 30 GB, optimizer 60 GB); it "
        "must fit in 80 GB, the memory of NVIDIA H100 80GB HBM3; try a sharded state "
        "(config.strategy='data_parallel', config.exchange='zero3') or more stages (config.strategy='pipeline', "
        "config.mesh.stage) or a smaller config.model"
    )
    stashed = plan_of({"parameters": 10**9, "stashes": 90 * 10**9})
    reason = refusal(stashed, cluster.named_cluster("H100", 1))
    assert "try a higher config.pipeline.num_microbatches, config.pipeline.remat='full' or" in reason
    check_memory(plan_of(parts), cluster.named_cluster("B200", 1))
    check_memory(plan_of(parts), cluster.named_cluster("cpu", 1))  # unknown memory
    on_host = {"parameters": 80 * 10**9, f"optimizer{ON_HOST}": 60 * 10**9}
    check_memory(plan_of(on_host), cluster.named_cluster("H100", 1))


def test_cpu_devices_share_the_memory_of_a_machine() -> None:
    parts = {"parameters": 10 * 10**9, "optimizer": 20 * 10**9, f"optimizer{ON_HOST}": 5 * 10**9, "private": 0}
    one_machine = cluster.Cluster("cpu", "cpu", 4, memory_bytes=100 * 10**9)
    check_memory(plan_of(parts, parts), one_machine)
    reason = refusal(plan_of(parts, parts, parts), one_machine)
    assert reason == (
        "config.strategy is 'data_parallel', which needs 105 GB on devices 0 to 2 (parameters 30 GB, optimizer 60 GB, "
        "optimizer on the host 15 GB); it must fit in 100 GB, the memory of this machine; try a sharded state "
        "(config.strategy='data_parallel', config.exchange='zero3') or fewer replicas (config.mesh.data) or a smaller "
        "config.model"
    )
    two_processes = cluster.Cluster("cpu", "cpu", 4, num_processes=2, memory_bytes=100 * 10**9)
    check_memory(plan_of(parts, parts, parts, parts), two_processes)
    large = {"parameters": 70 * 10**9}
    reason = refusal(plan_of(parts, parts, parts, large), two_processes)
    assert "needs 105 GB on devices 2 to 3 (parameters 80 GB, " in reason
    reason = refusal(plan_of({"parameters": 101 * 10**9}), one_machine)
    assert reason.endswith(
        "needs 101 GB on device 0 (parameters 101 GB); it must fit in 100 GB, the memory of "
        "this machine; try a smaller config.model"
    )


@pytest.mark.parametrize("strategy", ["single", "data_parallel"])
def test_activations_in_flight(strategy: str) -> None:
    """Most of XLA's temporary memory is activations saved for the backward pass; remat and accumulation reduce them."""

    def in_flight(*more: str) -> tuple[int, int]:
        replicas = 2 if strategy == "data_parallel" else 1
        sizes = "--config.batch_size=256", "--config.model.hidden_size=32", f"--config.mesh.data={replicas}"
        config = make_config(task, f"--config.strategy={strategy}", *sizes, *more)
        batch = {name: jax.ShapeDtypeStruct((256, *x.shape[1:]), x.dtype) for name, x in example.items()}
        problem = make_problem(config, task)._replace(batch=batch)
        parts = strategies.in_flight_bytes(strategies.plan(config, problem, cluster.find_cluster()), problem)
        assert parts["gradients"] == nbytes(problem.model.shapes)
        if more:
            return parts["activations"], 0
        [program] = strategies.make(config, problem).compile()
        analysis = program.compiled.memory_analysis()
        assert analysis is not None
        return parts["activations"], analysis.temp_size_in_bytes

    task = Task("bert", "classification", layers=4)  # with fewer, what one layer works with is much of the memory
    example = make_problem(make_config(task), task).batch
    saved, temporary = in_flight()
    assert 0.65 * temporary < saved < temporary
    assert in_flight("--config.optimizer.accumulation_steps=2")[0] == pytest.approx(saved / 2, rel=0.05)
    assert in_flight("--config.model.remat=full")[0] < in_flight("--config.model.remat=dots")[0] < saved


def test_a_pipelines_activations_are_in_its_memory() -> None:
    task = Task("mlp", "classification")
    config = make_config(task, *pipeline("1f1b", 2))
    problem = make_problem(config, task)
    plan = strategies.plan(config, problem, cluster.find_cluster())
    assert plan.memory[0]["stashes"] > 0
    assert strategies.in_flight_bytes(plan, problem) == {"gradients": plan.memory[0]["parameters"]}


def test_a_strategy_that_needs_less() -> None:
    """Parameters and Adam's two moments need three times the memory of the parameters; a device has twice as much."""
    task = Task("mlp", "classification")
    problem = make_problem(make_config(task), task)
    small = cluster.Cluster("gpu", "small", 2, memory_bytes=2 * nbytes(problem.model.shapes))
    config = make_config(task, "--config.strategy=data_parallel", "--config.mesh.data=2")
    reason = strategies.possible(config, problem, small)
    assert isinstance(reason, str)
    assert reason.startswith("config.strategy is 'data_parallel', which needs ")
    config.exchange = "zero3"
    plan = strategies.possible(config, problem, small)
    assert isinstance(plan, Plan)
    assert max(plan.device_bytes) < 2 * nbytes(problem.model.shapes)


# name -> (overrides for 4 devices, messages of one device per step by axis), for a model with 6 arrays
MESSAGES: dict[str, tuple[list[str], dict[str, int]]] = {
    "sharding": (["mesh.data=4"], {"data": 6 * 6}),
    "pmap": (["mesh.data=4", "data_parallel.implementation=pmap"], {"data": 6 * 6}),
    "one bucket": (["mesh.data=4", "data_parallel.implementation=shard_map"], {"data": 6}),
    "buckets": (["mesh.data=4", "exchange_options.bucket_bytes=4"], {"data": 6 * 6}),
    "horovod": (["mesh.data=4", "exchange=horovod"], {"data": 6}),
    "byteps": (["mesh.data=4", "exchange=byteps"], {"data": 6}),
    "byteps_onebit": (
        ["mesh.data=4", "exchange=byteps_onebit", "exchange_options.min_compress_bytes=0"],
        {"data": 6},
    ),
    "bagua_decentralized": (["mesh.data=4", "exchange=bagua_decentralized"], {"data": 1}),
    "bagua_low_precision_decentralized": (["mesh.data=4", "exchange=bagua_low_precision_decentralized"], {"data": 2}),
    "dp": (["mesh.data=4", "exchange=dp"], {"data": 3 * 6}),
    "diloco": (
        # In a round of 2 steps, 3 of 4 workers push 6 arrays and pull them.
        ["strategy=async_data_parallel", "mesh.data=4", "asynchronous.policy=diloco", "asynchronous.interval=2"],
        {"data": 2 * 3 * 6 // 2},
    ),
    # 4 microbatches, each with an activation from one of two peers, and a gradient from the other.
    "swarm": (["strategy=swarm", "swarm.peers=2", "swarm.num_microbatches=4"], {"stage": 4}),
    # 2 microbatches forward and backward, plus a clock to fill and one to drain the pipeline; one route each clock.
    "gpipe": (
        ["strategy=pipeline", "mesh.stage=2", "mesh.data=2", "pipeline.schedule=gpipe", "pipeline.num_microbatches=2"],
        {"stage": 6, "data": 2},
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_a_step(name: str) -> None:
    overrides, expected = MESSAGES[name]
    task = Task("mlp", "classification", layers=1)
    config = make_config(task, "--config.strategy=data_parallel", *(f"--config.{one}" for one in overrides))
    problem = make_problem(config, task)
    plan = strategies.plan(config, problem, cluster.named_cluster("cpu", 4))
    assert len(jax.tree.leaves(problem.model.shapes)) == 6
    assert {axis: messages for axis, (_, messages) in plan.sent_by_axis().items()} == expected


ASYNC = "strategy=async_data_parallel"
INSTEAD = "and learns slowly; use the default options, exchange"
ONEBIT, RANDOMK = ["exchange=byteps_onebit"], ["exchange=byteps_randomk"]
COARSE_ONEBIT = [*ONEBIT, "exchange_options.block=2048"]
# (overrides, part of the advice)
ADVICE: dict[str, tuple[list[str], str]] = {
    "onebit": (ONEBIT, ""),
    "onebit, large blocks": (COARSE_ONEBIT, "adamw divides by the size of the noise that byteps_onebit block=2048 "),
    "onebit, whole vectors": ([*ONEBIT, "exchange_options.block=0"], "adamw divides by the size of the noise that"),
    "randomk": ([*RANDOMK, "optimizer.name=lamb"], ""),
    "randomk, few": ([*RANDOMK, "optimizer.name=lamb", "exchange_options.ratio=0.05"], "lamb divides by the size of"),
    "onebit_adam instead": (COARSE_ONEBIT, f"{INSTEAD} onebit_adam or byteps_topk, or optimizer sgd"),
    "onebit with muon": ([*COARSE_ONEBIT, "optimizer.name=muon"], f"{INSTEAD} bagua_bytegrad or byteps_topk"),
    "randomk, few, with adafactor": ([*RANDOMK, "optimizer.name=adafactor", "exchange_options.ratio=0.05"], ""),
    "onebit with lion": ([*COARSE_ONEBIT, "optimizer.name=lion"], ""),
    "onebit with sgd": ([*COARSE_ONEBIT, "optimizer.name=sgd"], ""),
    "topk": (["exchange=byteps_topk"], ""),
    "diloco": ([ASYNC, "asynchronous.policy=diloco"], "config.asynchronous.outer_momentum is 0.9, which is too high"),
    "diloco with less": ([ASYNC, "asynchronous.policy=diloco", "asynchronous.outer_momentum=0.7"], ""),
    "local_sgd": ([ASYNC, "asynchronous.policy=local_sgd"], ""),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_against_settings_that_train_badly(name: str) -> None:
    overrides, expected = ADVICE[name]
    task = Task("mlp", "classification", layers=1)
    config = make_config(task, "--config.strategy=data_parallel", *(f"--config.{one}" for one in overrides))
    if config.exchange.startswith("byteps"):  # the arrays of this model are small
        config.exchange_options.min_compress_bytes = 0
    advice = strategies.plan(config, make_problem(config, task), cluster.named_cluster("cpu", 4)).advice
    assert expected in advice
    assert bool(advice) == bool(expected)


def test_an_empty_batch() -> None:
    config = default_config()
    config.strategy, config.batch_size = "single", 0
    with pytest.raises(UserError, match=r"^config\.batch_size is 0; it must be at least 1$"):
        strategies.decide(config, cluster.named_cluster("cpu", 1))


def test_configs_that_several_processes_cannot_run() -> None:
    config, there = default_config(), cluster.named_cluster("cpu", 8, num_processes=2)
    config.strategy, config.mesh.data = "data_parallel", 2
    with pytest.raises(UserError, match=r"data is 2 and config.mesh.stage is 1; their product must be 8, the number"):
        strategies.decide(config, there)
    config.strategy = "single"
    with pytest.raises(UserError, match="runs in a single process, but there are 2 processes; use"):
        strategies.decide(config, there)


class Gpu(NamedTuple):
    """A device as JAX describes a GPU."""

    device_kind: str
    compute_capability: str = "9.0"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 60}

    def addressable_memories(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("kind", "bandwidth"), {"NVIDIA H100 80GB HBM3": 3_352_320_000_000, "GeForce 256": None}.items()
)
def test_the_bandwidth_of_present_gpus(kind: str, bandwidth: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX does not report it; the kind of the GPU determines it."""
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda: [Gpu(kind)])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    there = cluster.find_cluster()
    assert (there.platform, there.memory_bytes, there.memory_bandwidth) == ("gpu", 60, bandwidth)


def test_clusters() -> None:
    there = cluster.find_cluster()
    assert (there.platform, there.num_devices, there.num_processes) == ("cpu", 8, 1)
    assert there.memory_bandwidth is None
    named = cluster.named_cluster("H100", 16, num_processes=2, links={"data": Link(4e11)})
    assert named.peak_flops["bfloat16"] == 989.5e12
    assert named.compute_capability == "9.0"
    assert named.links["data"].bandwidth == 4e11
    with pytest.raises(UserError, match=r"device kind is 'H10'; it must be one of .* Did you mean 'h100'"):
        cluster.named_cluster("H10", 8)
    with pytest.raises(UserError, match="num_devices is 0; it must be at least 1"):
        cluster.named_cluster("H100", 0)
    for number in (16, 3, 0, -1):
        with pytest.raises(UserError, match=f"num_processes is {number}; it must divide the number of devices, 8"):
            cluster.named_cluster("H100", 8, num_processes=number)
