"""One table of configs of all strategies, which all train one small problem. Each is built once per process.

Its model has two streams of activations, dropout, and a head tied to the embedding. Gradients are clipped, examples and
positions have different weights, and the last three examples are padding.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jaxpar import cluster, strategies
from jaxpar.core import state as states
from jaxpar.core.state import Canonical
from jaxpar.core.step import Metrics, Problem
from jaxpar.inspect import certificate, certificate_report
from jaxpar.inspect.reference import Reference, Runs, recording
from jaxpar.run.build import Run
from jaxpar.strategies import Strategy
from jaxpar.tasks import Sums
from tests.strategies import pipelines
from tests.strategies.pipelines import TWO_STREAMS, Task

TASK = Task(TWO_STREAMS, "causal_lm", layers=4)
SIZE = 24  # examples of a batch
NUM_STEPS = 3

DATA = "strategy=data_parallel mesh.data=4"
TWICE = "optimizer.accumulation_steps=2"
STAGES = "strategy=pipeline pipeline.num_microbatches=4 pipeline.remat=none"
TWO, FOUR = f"{STAGES} mesh.stage=2", f"{STAGES} mesh.stage=4"
EQUAL = "mix_0,mix_2,head"  # the two stages in the middle share a program
DISPATCH = "pipeline.executor=dispatch"
ASYNC = "strategy=async_data_parallel asynchronous.mitigations= mesh.data=2"
ONEBIT = "exchange=byteps_onebit exchange_options.min_compress_bytes=0"
# Each trains like one device: every strategy, implementation, exact exchange, schedule with a flush, and executor.
EXACT = {
    "single": "strategy=single",
    "single, 4 microbatches": "strategy=single optimizer.accumulation_steps=4",
    "single, scan, remat": "strategy=single model.scan_layers=True model.remat=full",
    "sharding": "strategy=data_parallel mesh.data=8 data_parallel.implementation=sharding",
    "sharding, 2 microbatches": f"{DATA} {TWICE} data_parallel.implementation=sharding",
    "pmap": f"{DATA} {TWICE} data_parallel.implementation=pmap",
    "dp": f"{DATA} {TWICE} exchange=dp",
    "ddp, 3 replicas": "strategy=data_parallel mesh.data=3 exchange=ddp exchange_options.bucket_bytes=4000",
    "ddp, groups": f"{DATA} {TWICE} exchange=ddp exchange_options.group=2",
    "horovod": f"{DATA} exchange=horovod exchange_options.predivide=2.0",
    "byteps": f"{DATA} exchange=byteps exchange_options.bucket_bytes=1000",
    "byteps, groups": f"{DATA} exchange=byteps exchange_options.group=2",
    "zero1": f"{DATA} {TWICE} exchange=zero1",
    "zero2": f"{DATA} {TWICE} exchange=zero2",
    "zero2, offload": f"{DATA} exchange=zero2 exchange_options.offload=True",
    "zero3": f"{DATA} {TWICE} exchange=zero3",
    "zero3, scan": f"{DATA} exchange=zero3 model.scan_layers=True model.remat=dots exchange_options.bucket_bytes=1000",
    "hsdp": f"{DATA} {TWICE} exchange=hsdp exchange_options.group=2",
    "one stage": f"{STAGES} mesh.stage=1 mesh.data=2 pipeline.schedule=1f1b",
    "model_parallel": f"{TWO} mesh.data=2 pipeline.schedule=model_parallel pipeline.partition=mix_3",
    "gpipe": f"{TWO} mesh.data=2 pipeline.schedule=gpipe pipeline.remat=full",
    "1f1b": f"{FOUR} mesh.data=2 pipeline.schedule=1f1b pipeline.remat=dots",
    "1f1b, horovod": f"{TWO} mesh.data=2 pipeline.schedule=1f1b exchange=horovod",
    "1f1b, byteps": f"{TWO} mesh.data=2 pipeline.schedule=1f1b exchange=byteps",
    "eager_1f1b": f"{FOUR} pipeline.schedule=eager_1f1b pipeline.partition=mix_0,mix_1,head",
    "interleaved_1f1b": f"{TWO} mesh.data=2 pipeline.schedule=interleaved_1f1b pipeline.remat=full",
    "zb_h1": f"{FOUR} pipeline.schedule=zb_h1 pipeline.partition={EQUAL}",
    "zb_h2": f"{TWO} mesh.data=2 pipeline.schedule=zb_h2 pipeline.remat=dots",
    "zb_v": f"{TWO} mesh.data=2 pipeline.schedule=zb_v",
    "zb_v, remat": f"{STAGES} mesh.stage=3 pipeline.schedule=zb_v pipeline.partition=uniform pipeline.remat=full",
    "1f1b, 1,2,1 devices": f"{FOUR} pipeline.schedule=1f1b pipeline.replicas=1,2,1",
    "dispatched 1f1b": f"{TWO} mesh.data=2 pipeline.schedule=1f1b {DISPATCH}",
    "dispatched zb_v": f"{TWO} pipeline.schedule=zb_v pipeline.remat=full {DISPATCH}",
    "dispatched interleaved_1f1b": f"{TWO} pipeline.schedule=interleaved_1f1b {DISPATCH}",
    "dispatched zb_h1": f"{FOUR} pipeline.schedule=zb_h1 pipeline.partition={EQUAL} pipeline.remat=dots {DISPATCH}",
    "dispatched 1f1b, 2,1 devices": f"{STAGES} mesh.stage=3 mesh.data=2 pipeline.schedule=1f1b pipeline.replicas=2,1"
    f" {DISPATCH}",
    "dispatched 1f1b, 1,3 devices": f"{FOUR} pipeline.schedule=1f1b pipeline.replicas=1,3 {DISPATCH}",
    "1f1b, zero1": f"{FOUR} mesh.data=2 pipeline.schedule=1f1b exchange=zero1",
    "zb_v, zero1": f"{TWO} mesh.data=2 pipeline.schedule=zb_v exchange=zero1",
    "dispatched 1f1b, zero1": f"{STAGES} mesh.stage=3 mesh.data=2 pipeline.schedule=1f1b pipeline.replicas=2,1"
    f" exchange=zero1 {DISPATCH}",
    "dispatched 1f1b, zero2": f"{TWO} mesh.data=3 pipeline.schedule=1f1b exchange=zero2 {DISPATCH}",
    "dispatched zb_v, zero3": f"{TWO} mesh.data=2 pipeline.schedule=zb_v exchange=zero3 {DISPATCH}",
    "dispatched 1f1b, hsdp": f"{TWO} mesh.data=4 pipeline.num_microbatches=3 pipeline.schedule=1f1b"
    f" pipeline.remat=full exchange=hsdp exchange_options.group=2 {DISPATCH}",
    "async of 1": f"{ASYNC} mesh.data=1 asynchronous.policy=async asynchronous.num_workers=1",
    "sync": f"{ASYNC} asynchronous.policy=sync asynchronous.num_workers=4",
    "swarm": "strategy=swarm mesh.data=2 swarm.peers=5 swarm.num_microbatches=4",
}
# What differs from training on one device, with state of its own in most cases.
LOSSY = {
    "byteps_onebit": f"{DATA} {ONEBIT} exchange_options.momentum=0.5",
    **{
        name: f"{DATA} exchange={name} exchange_options.min_compress_bytes=0"
        for name in ("byteps_topk", "byteps_randomk", "byteps_dithering")
    },
    "bagua_bytegrad": f"{DATA} exchange=bagua_bytegrad",
    "byteps_onebit in groups": f"{DATA} {ONEBIT} exchange_options.group=2",
    "horovod_adasum": f"{DATA} exchange=horovod_adasum",
    "horovod, 2 passes": f"{DATA} exchange=horovod exchange_options.backward_passes_per_step=2",
    "bagua_qadam": f"{DATA} exchange=bagua_qadam exchange_options.warmup=0.2",
    "onebit_adam": f"{DATA} exchange=onebit_adam exchange_options.warmup=0.2",
    "onebit_adam in groups": f"{DATA} exchange=onebit_adam exchange_options.warmup=0.2 exchange_options.group=2",
    "bagua_decentralized": f"{DATA} exchange=bagua_decentralized exchange_options.group=2",
    "bagua_low_precision_decentralized": f"{DATA} exchange=bagua_low_precision_decentralized exchange_options.group=2",
    "bagua_model_average": f"{DATA} exchange=bagua_model_average exchange_options.interval=3",
    "powersgd": f"{DATA} exchange=powersgd exchange_options.rank=1 exchange_options.warmup=0.2",
    "1f1b, byteps_onebit": f"{TWO} mesh.data=2 pipeline.schedule=1f1b {ONEBIT}",
    "zb_v, byteps_onebit": f"{TWO} mesh.data=2 pipeline.schedule=zb_v {ONEBIT}",
    "dispatched 1f1b, quantized zero3": f"{TWO} mesh.data=2 pipeline.schedule=1f1b exchange=zero3"
    f" exchange_options.quantized_weights=True exchange_options.quantized_gradients=True {DISPATCH}",
    "dispatched 1f1b, byteps_onebit": f"{TWO} mesh.data=2 pipeline.schedule=1f1b {ONEBIT} {DISPATCH}",
}
# Gradients of earlier weights, or weights that are averaged now and then. What is in flight is private.
WORKERS = f"{ASYNC} asynchronous.delays.distribution=lognormal asynchronous.num_workers="
STALE = {
    "async": f"{WORKERS}8 asynchronous.policy=async asynchronous.mitigations=adaptive_dc_asgd,staleness_aware",
    "softsync": f"{WORKERS}2 mesh.data=4 asynchronous.policy=softsync",  # the server has a device of its own
    "local_sgd": f"{WORKERS}8 asynchronous.policy=local_sgd asynchronous.interval=2",
    "diloco": f"{WORKERS}8 asynchronous.policy=diloco asynchronous.interval=2",
    "model_average": f"{WORKERS}8 asynchronous.policy=model_average asynchronous.interval=2",
    "swarm, delayed": "strategy=swarm mesh.data=2 swarm.peers=3 swarm.num_microbatches=4 swarm.delayed=True",
}
CASES = EXACT | LOSSY | STALE


class Trained(NamedTuple):
    """Training with one strategy.

    Attributes:
      strategy: the strategy.
      metrics: of every step.
      trees: the canonical state after every step.
      private: the private state after NUM_STEPS steps, and after the last one: more steps for what is lossy.
      state: the state after the last step.
    """

    strategy: Strategy[Any]
    metrics: list[Metrics]
    trees: list[Canonical]
    private: list[Canonical]
    state: Any


def overrides(name: str) -> tuple[str, ...]:
    """Return the overrides of a case of the table."""
    return tuple(
        f"--config.{setting}" for setting in (f"batch_size={SIZE}", "optimizer.clip_norm=0.2", *CASES[name].split())
    )


def batch(step: int) -> dict[str, Any]:
    """Return the batch of a step."""
    return pipelines.make_batch(TASK, step, SIZE)


@functools.cache
def config(name: str) -> ConfigDict:
    """Return the config of a case."""
    return pipelines.make_config(TASK, *overrides(name))


@functools.cache
def problem(name: str) -> Problem:
    """Return the problem of a case. For certificates, its optimizer records gradients and updates."""
    made = pipelines.make_problem(config(name), TASK, pipelines.build_once)
    return made._replace(optimizer=optax.chain(recording(), made.optimizer, recording()))


@functools.cache
def start() -> Canonical:
    """Return the state at which all cases start."""
    made, tree = problem("single"), pipelines.start(TASK)
    like = states.to_canonical(states.abstract_state(made.model, made.optimizer))
    return tree | {"optimizer": jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like["optimizer"])}


@functools.lru_cache(maxsize=8)  # a compiled pipeline takes about 50 MB
def build(name: str) -> Strategy[Any]:
    """Return the strategy of a case, which is built once for several tests of it."""
    made, there = problem(name), cluster.find_cluster()
    return strategies.build(pipelines.plan_on(config(name), made, there), made, cluster.devices())


def evaluate(strategy: Strategy[Any], state: Any) -> Sums:
    return jax.device_get(strategy.evaluate(state, strategy.place(batch(NUM_STEPS))))


@functools.lru_cache(maxsize=2)
def train(name: str) -> Trained:
    """Train with the strategy of a case."""
    trained = Trained(build(name), [], [], [], None)
    strategy, state = trained.strategy, trained.strategy.from_canonical(start())
    for step in range(NUM_STEPS if name in EXACT else 2 * NUM_STEPS):
        state, metrics = strategy.step(state, strategy.place(batch(step)))
        trained.metrics.append(jax.device_get(metrics))
        trained.trees.append(jax.device_get(strategy.to_canonical(state)))
        if step + 1 in (NUM_STEPS, 2 * NUM_STEPS):
            trained.private.append(jax.device_get(strategy.to_private(state)))
    return trained._replace(state=state)


@functools.cache
def single() -> Trained:
    """Return the training on one device, the reference."""
    return train("single")


class Numbered(NamedTuple):
    """The batches of the problem, as those of a run of one epoch."""

    steps_per_epoch: int = NUM_STEPS

    def batch(self, step: int) -> dict[str, Any]:
        return batch(step)

    def examples_before(self, step: int) -> int:
        return step * SIZE


def run(name: str, strategy: Strategy[Any]) -> Run:
    """Return the run of a case, without what a certificate does not read."""
    unread: Any = None
    batches: Any = Numbered()
    return Run(
        config=config(name),
        workdir=Path("no checkpoints"),
        dataset=unread,
        batches=batches,
        problem=problem(name),
        pretrained=None,
        cluster=cluster.find_cluster(),
        strategy=strategy,
        learning_rate=unread,
        num_steps=NUM_STEPS,
        phases=unread,
    )


@functools.cache
def reference() -> Reference:
    """Return the reference of all certificates, whose programs they share."""
    return Reference(run("single", single().strategy))


def certify(name: str) -> dict[str, Any]:
    """Return the certificate of a case."""
    one_device = run("single", single().strategy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "Reference", lambda _run: reference())
        return certificate_report.issue(Runs(run(name, build(name)), one_device, one_device))
