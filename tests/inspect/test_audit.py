"""Tests of the audit: the traffic of compiled steps matches the formulas, and unexplained traffic is detected."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxpar import config as configs
from jaxpar.commands import audit as command
from jaxpar.core import step
from jaxpar.core.plan import Decision, Plan, Traffic
from jaxpar.exchange import EXCHANGES, Axis, reduce
from jaxpar.inspect import audit, audit_report
from jaxpar.inspect.audit import SCALARS, CollectiveRow, axis_of
from jaxpar.run import build
from jaxpar.strategies.strategy import CompiledProgram
from jaxpar.tasks.classification import TASK
from tests.runs import run_script, small_arguments, without_texts
from tests.strategies.pipelines import TRANSFORMER, VOCABULARY, Task, make, make_config, make_problem, pipeline
from tests.strategies.test_exchanges import TWICE, option, replicated

N = 4
MLP, ADAM = Task("mlp", "classification", "sgd", layers=1), Task("mlp", "classification", layers=1)
WIDE = "--config.model.hidden_size=910"
# Bytes that a device sends per element, for 8-bit and 1-bit compressors, in vectors much longer than a block.
BYTE, BIT, ROW_BIT = 3 / 4 * (1 + 8 / 4096), 3 / 4 * (1 / 8 + 4 / 2048), 3 / 4 * (1 / 8 + 4 / 128)
REDUCE, SCATTER, GATHER = ("all-reduce", "float32"), ("reduce-scatter", "float32"), ("all-gather", "float32")
CODES, CODES_OF_MEANS = ("all-to-all", "uint8"), ("all-gather", "uint8")
PERMUTE = "collective-permute", "float32"
Sent = dict[tuple[str, str], float]


def codes(size: float) -> Sent:
    return {CODES: size, CODES_OF_MEANS: size}


# name -> (overrides, bytes that one of 4 devices sends / number of parameters, computed by hand)
SENT: dict[str, tuple[tuple[str, ...], Sent]] = {
    "ddp": (replicated("ddp"), {REDUCE: 6}),
    "dp": (replicated("dp"), {}),
    "horovod": (replicated("horovod"), {PERMUTE: 6}),
    "byteps": (replicated("byteps"), {SCATTER: 3, GATHER: 3}),
    "byteps_onebit": (replicated("byteps_onebit"), codes(ROW_BIT)),
    "byteps_topk": (replicated("byteps_topk"), codes(3 / 4 * 0.01 * 8)),
    "byteps_randomk": (replicated("byteps_randomk"), codes(3 / 4 * 0.25 * 8)),
    "byteps_dithering": (replicated("byteps_dithering"), codes(3 / 4)),
    "bagua_bytegrad": (replicated("bagua_bytegrad"), codes(BYTE)),
    "horovod_adasum": (replicated("horovod_adasum"), {PERMUTE: 8}),
    "bagua_qadam": (replicated("bagua_qadam", option("warmup", 0.3)), {REDUCE: 0.3 * 6, **codes(0.7 * BYTE)}),
    "bagua_decentralized": (replicated("bagua_decentralized"), {PERMUTE: 4}),
    "bagua_decentralized, every third step": (
        replicated("bagua_decentralized", option("interval", 3)),
        {PERMUTE: 4 / 3},
    ),
    "bagua_decentralized, all": (replicated("bagua_decentralized", option("peers", "all")), {REDUCE: 6}),
    "bagua_low_precision_decentralized": (
        replicated("bagua_low_precision_decentralized"),
        {("collective-permute", "uint8"): 2 * (1 + 8 / 4096)},
    ),
    "bagua_model_average": (replicated("bagua_model_average", option("interval", 3)), {REDUCE: 6 / 3}),
    "zero1": (replicated("zero1"), {SCATTER: 3, GATHER: 3}),
    "zero2": (replicated("zero2"), {SCATTER: 3, GATHER: 3}),
    "zero3": (replicated("zero3"), {SCATTER: 3, GATHER: 6}),
    # In 2 groups of 2: each shard is half of the arrays, and a ring of 2 sends half of it in each pass.
    "hsdp": (replicated("hsdp", option("group", 2)), {SCATTER: 2, GATHER: 4, REDUCE: 2}),
    "onebit_adam": (replicated("onebit_adam"), {REDUCE: 0.2 * 6, **codes(0.8 * BIT)}),
    # 4 (m + n) elements of the arrays [192, 910] and [910, 910], and all of [910, 5], [910], [910] and [5].
    "powersgd": (
        replicated("powersgd"),
        {REDUCE: 6 * (0.1 + 0.9 * (4 * (192 + 910 + 910 + 910) + 910 * 5 + 910 + 910 + 5) / 1_009_195)},
    ),
    "zero2, 2 microbatches": (replicated("zero2", TWICE), {SCATTER: 6, GATHER: 3}),
    "zero3, 2 microbatches": (replicated("zero3", TWICE), {SCATTER: 6, GATHER: 12}),
    "zero3, quantized": (
        replicated("zero3", option("quantized_weights", "True"), option("quantized_gradients", "True")),
        {CODES: 3 / 4 * (1 + 8 / 2048), CODES_OF_MEANS: 2 * 3 / 4 * (1 + 8 / 2048)},
    ),
    "ddp, groups": (replicated("ddp", option("group", 2)), {SCATTER: 2, REDUCE: 2, GATHER: 2}),
    "bagua_bytegrad, groups": (  # half of each vector is sent between the 2 groups
        replicated("bagua_bytegrad", option("group", 2)),
        {
            SCATTER: 2,
            GATHER: 2,
            **codes(1 / 2 * 1 / 2 * (1 + 8 / 4096)),
        },
    ),
    "bagua_decentralized, groups": (
        replicated("bagua_decentralized", option("group", 2)),
        {SCATTER: 2, GATHER: 2, PERMUTE: 4 / 2},
    ),
    "bagua_low_precision_decentralized, groups": (
        replicated("bagua_low_precision_decentralized", option("group", 2)),
        {SCATTER: 2, GATHER: 2, ("collective-permute", "uint8"): 2 / 2 * (1 + 8 / 4096)},
    ),
    "byteps, groups": (replicated("byteps", option("group", 2)), {SCATTER: 2 + 1, GATHER: 2 + 1}),
    "ddp, float16": (replicated("ddp", option("wire_dtype", "float16")), {("all-reduce", "float16"): 3}),
    "horovod, bfloat16": (  # sent as uint16, because XLA on CPUs widens 16-bit floats
        replicated("horovod", option("wire_dtype", "bfloat16")),
        {("collective-permute", "uint16"): 3},
    ),
    "ddp, float8": (replicated("ddp", option("wire_dtype", "float8_e4m3fn")), codes(3 / 4 * (1 + 4 / 4096))),
    "horovod, float8, groups": (
        replicated("horovod", option("wire_dtype", "float8_e5m2"), option("group", 2)),
        {SCATTER: 2, GATHER: 2, **codes(1 / 2 * 1 / 2 * (1 + 4 / 4096))},
    ),
    "byteps, cut": (replicated("byteps", option("bucket_bytes", 2 * 10**6)), {SCATTER: 3, GATHER: 3}),
    "5 passes": (replicated("horovod", option("backward_passes_per_step", 5)), {PERMUTE: 6 / 5}),
    "sharding": (replicated("ddp", "--config.data_parallel.implementation=sharding"), {REDUCE: 6}),
    "pmap": (replicated("ddp", "--config.data_parallel.implementation=pmap"), {REDUCE: 6}),
    "single": ((), {}),
}


@functools.cache
def compiled(name: str) -> tuple[list[CompiledProgram], Plan[object]]:
    task = ADAM if name in ("bagua_qadam", "onebit_adam") else MLP
    strategy = make(task, WIDE, *SENT[name][0])
    return strategy.compile(), strategy.plan


def rows_of(name: str) -> list[CollectiveRow]:
    programs, on = compiled(name)
    return audit.audit(programs, on, TASK)


@functools.cache
def number_of_parameters(task: Task, *overrides: str) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(make_problem(make_config(task, *overrides), task).model.shapes))


def counted(rows: list[CollectiveRow]) -> list[CollectiveRow]:
    """Return the rows without scalars and without the copies of dp, which are in no compiled program."""
    return [row for row in rows if row.kind != "copy" and row.dtype != SCALARS]


@pytest.mark.parametrize("name", SENT)
def test_traffic_matches_theory(name: str) -> None:
    rows = rows_of(name)
    assert [row for row in rows if not row.is_explained] == []
    size = number_of_parameters(MLP, WIDE)
    assert size > 1e6
    sent = {(row.kind, row.dtype): row for row in counted(rows)}
    assert sent.keys() == SENT[name][1].keys()
    for key, expected in SENT[name][1].items():
        row = sent[key]
        assert row.theory == pytest.approx(expected * size, rel=0.01), key
        assert row.axis == "data"
        assert row.ratio is not None
        # XLA reuses gathered weights on the CPU, and sends one message to a neighbour on both sides.
        if row.kind == "all-gather" if name.startswith(("zero3", "hsdp")) else "low_precision_decentralized, g" in name:
            assert 0.5 <= row.ratio <= 1, key
        else:
            assert row.ratio == pytest.approx(1, abs=0.01), key


def test_zero3_sends_a_tied_array_with_each_of_its_layers() -> None:
    """The head of a GPT gathers the token embedding again, and scatters the gradient of it separately."""
    task = Task("gpt", "causal_lm", "sgd", layers=1)
    strategy = make(task, *replicated("zero3"))
    sent = {(row.kind, row.dtype): row for row in counted(audit.audit(strategy.compile(), strategy.plan, TASK))}
    used = number_of_parameters(task) + VOCABULARY * TRANSFORMER["hidden_size"]
    assert sent[SCATTER].nbytes == sent[SCATTER].theory == 3 * used
    assert sent[GATHER].theory == 2 * 3 * used
    assert sent[GATHER].is_explained


def test_every_exchange_is_audited() -> None:
    assert set(EXCHANGES) <= SENT.keys()


@pytest.mark.parametrize(("name", "share"), [("bagua_bytegrad", 0.2525), ("byteps_onebit", 0.0395)])
def test_compressed_traffic_is_a_small_fraction_of_ddp(name: str, share: float) -> None:
    sent, of_ddp = ([row for row in rows_of(which) if row.dtype != SCALARS] for which in (name, "ddp"))
    assert sum(row.nbytes for row in sent) <= share * sum(row.nbytes for row in of_ddp)


def test_dp_has_copies_and_no_collective() -> None:
    size = (N - 1) * 4 * number_of_parameters(MLP, WIDE)
    assert rows_of("dp") == [CollectiveRow("copy", "data", "float32", 0, 0, size, size)]


def test_a_pipeline_of_2_replicas() -> None:
    strategy = make(
        MLP, *pipeline("gpipe", 2, "--config.exchange=byteps_onebit", option("min_compress_bytes", 0), replicas=2)
    )
    rows = audit.audit(strategy.compile(), strategy.plan, TASK)
    assert [row for row in rows if not row.is_explained] == []
    sent = {(row.kind, row.axis, row.dtype): row for row in counted(rows)}
    kinds = CODES, CODES_OF_MEANS
    assert sent.keys() == {(kind, "data", dtype) for kind, dtype in kinds} | {(PERMUTE[0], "stage", PERMUTE[1])}
    assert all(row.ratio == pytest.approx(1, abs=0.01) for row in sent.values())


def test_a_pipeline_without_a_flush() -> None:
    """Gradients are exchanged within a loop of at most one iteration; two stages transfer in every other clock."""
    strategy = make(MLP, *pipeline("pipedream", 2, "--config.pipeline.num_microbatches=4", replicas=2))
    [gradients, transfers] = counted(audit.audit(strategy.compile(), strategy.plan, TASK))
    assert (transfers.kind, transfers.axis, transfers.number, transfers.ratio) == ("collective-permute", "stage", 4, 1)
    assert (gradients.kind, gradients.axis, gradients.ratio) == ("all-reduce", "data", 1)


# ---- planted errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp", "byteps_onebit", "zero1"])
def test_less_theory_leaves_a_row_unexplained(name: str) -> None:
    programs, on = compiled(name)
    for one in on.traffic:
        others = tuple(other for other in on.traffic if other.kind != one.kind)
        half = (*others, *(o._replace(nbytes=o.nbytes / 2) for o in on.traffic if o.kind == one.kind))
        elsewhere = tuple(o._replace(axis="stage") for o in on.traffic)
        twice = (*others, *(o._replace(nbytes=o.nbytes * 2) for o in on.traffic if o.kind == one.kind))
        for wrong in (others, half, twice, elsewhere):
            rows = audit.audit(programs, dataclasses.replace(on, traffic=wrong), TASK)
            unexplained = {row.kind for row in counted(rows) if not row.is_explained}
            assert one.kind in unexplained


def test_theory_that_is_not_sent_is_shown() -> None:
    programs, on = compiled("ddp")
    more = Traffic("all-gather", "float32", "data", 1000.0, 1)
    rows = audit.audit(programs, dataclasses.replace(on, traffic=(*on.traffic, more)), TASK)
    [row] = [row for row in rows if not row.is_explained]
    assert row == CollectiveRow("all-gather", "data", "float32", 0, 0, 1000.0, 1000.0)


def test_many_scalars_are_unexplained() -> None:
    assert CollectiveRow("all-reduce", "data", SCALARS, 8, 256, None).is_explained
    assert not CollectiveRow("all-reduce", "data", SCALARS, 500, 16000, None).is_explained


def test_the_sums_of_many_targets_are_scalars(tmp_path: Path) -> None:
    """20 targets have 3 sums each, plus the loss and the weight."""
    values = [
        "task=regression",
        "model.name=mlp",
        "data.source=synthetic",
        "data.synthetic_examples=64",
        "batch_size=8",
    ]
    values += [f"data.target_columns={','.join('abcdefghijklmnopqrst')}", "mesh.data=2", f"cache_dir={tmp_path}"]
    config = configs.default_config()
    configs.override(config, [f"--config.{value}" for value in values])
    found = audit_report.audit_run(config, tmp_path)
    assert [row for row in found["collectives"] if not row["explained"]] == []
    [row] = [row for row in found["collectives"] if row["dtype"] == SCALARS]
    assert row["nbytes"] >= 62 * 4


@pytest.mark.parametrize("exchange", ["ddp", "zero1"])
def test_one_more_sum_is_unexplained(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An additional all-reduce of the largest gradient before the exchange is detected."""
    gradients = step.gradients

    def with_another(*arguments: Any, **options: Any) -> Any:
        grads, sums = gradients(*arguments, **options)
        linear = grads["embed"]["linear"]
        again, _ = reduce.psum(Axis("data", N)).mean(linear["kernel"], ())
        return grads | {"embed": {"linear": linear | {"kernel": again}}}, sums

    monkeypatch.setattr(step, "gradients", with_another)
    strategy = make(MLP, *replicated(exchange))
    rows = audit.audit(strategy.compile(), strategy.plan, TASK)
    assert [(row.kind, row.dtype) for row in rows if not row.is_explained] == [REDUCE]


# ---- which axis -------------------------------------------------------------------------------------

MESH = {"data": 2, "stage": 4}
GROUPS = {
    "along stages": (((0, 1, 2, 3), (4, 5, 6, 7)), "stage"),
    "along replicas": (((0, 4), (1, 5), (2, 6), (3, 7)), "data"),
    "pairs of stages": (((0, 1), (2, 3), (4, 5), (6, 7)), "stage"),
    "of some only": (((0, 2),), "stage"),
    "all": ((tuple(range(8)),), "data+stage"),
    "across": (((0, 5), (1, 4)), "((0, 5), (1, 4))"),
    "two lines of one axis and one of another": (((0, 1), (2, 6)), "((0, 1), (2, 6))"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_axis_of_groups(name: str) -> None:
    groups, axis = GROUPS[name]
    assert axis_of(groups, MESH) == axis


def test_an_axis_of_one_device_has_no_groups() -> None:
    assert axis_of(((0, 1, 2, 3),), {"data": 4, "stage": 1}) == "data"
    assert axis_of(((0, 1, 2, 3),), {"data": 1, "stage": 4}) == "stage"


# Groups in XLA's formats -> (axis, number of devices per group).
WRITTEN = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": ("stage", 4),
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": ("data", 2),
    "replica_groups={{0,1,2,3,4,5,6,7}}": ("data+stage", 8),
    "replica_groups=[2,4]<=[8]": ("stage", 4),
    "replica_groups=[1,8]<=[8]": ("data+stage", 8),
    "replica_groups=[4,2]<=[2,4]T(1,0)": ("data", 2),
    "replica_groups=[4,2]<=[8]": ("stage", 2),
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}": ("stage", 4),
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}": ("data", 2),
    "replica_groups=mesh['axis_0'=8] {'axis_0'}": ("data+stage", 8),
}


def sent_by(instruction: str) -> list[CollectiveRow]:
    """Audit a program with a single instruction, whose operand has 100 elements."""
    text = "ENTRY %main.1 (x: f32[100]) -> f32[100] {\n  %x = f32[100]{0} parameter(0)\n"
    text += f"  ROOT %sent = f32[100]{{0}} {instruction}\n}}\n"
    on_a_device = SimpleNamespace(device_set={jax.devices()[0]})
    compiled: Any = SimpleNamespace(as_text=lambda: text, input_shardings=[on_a_device])
    return audit.audit(
        [CompiledProgram(compiled)], Plan("single", Decision(MESH, 1, "", 2, None), "", {}, None, ()), TASK
    )


@pytest.mark.parametrize("groups", WRITTEN)
def test_groups_as_xla_writes_them(groups: str) -> None:
    axis, size = WRITTEN[groups]
    line = f"all-reduce(%x), channel_id=1, {groups}, use_global_device_ids=true, to_apply=%add"
    [row] = sent_by(line)
    assert row[:4] == ("all-reduce", axis, "float32", 1)
    assert not row.is_explained
    assert row.nbytes == pytest.approx(2 * (size - 1) / size * 400)


@pytest.mark.parametrize(
    ("pairs", "axis"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", "stage"),
        ("{{0,4},{4,0},{1,5},{5,1}}", "data"),
        ("{{0,1},{1,2},{2,3}}", "stage"),
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}", "data+stage"),
    ],
)
def test_the_axis_of_permutes(pairs: str, axis: str) -> None:
    rows = sent_by(f"collective-permute(%x), channel_id=1, source_target_pairs={pairs}")
    assert rows == [CollectiveRow("collective-permute", axis, "float32", 1, 400, None)]


def test_unknown_groups_are_not_ignored() -> None:
    try:
        rows = sent_by("all-reduce(%x), channel_id=1, replica_groups=<a new way>, to_apply=%add")
    except (AssertionError, ValueError):
        return
    assert [row for row in rows if not row.is_explained]


# ---- bytes ------------------------------------------------------------------------------------------


def held(task: Task, exchange: str, *options: str) -> dict[str, int]:
    """Return the bytes on each device in the compiled program, after checking that theory predicts them exactly."""
    strategy = make(task, *replicated(exchange, *options))
    devices = audit.memory(strategy.compile(), strategy)
    assert len(devices) == N
    assert all(parts == devices[0] for parts in devices)
    parts = {name: one for name, one in devices[0].items() if one.theory is not None}
    assert all(one.nbytes == one.theory for one in parts.values()), parts
    return {name: one.nbytes or 0 for name, one in parts.items()}


def test_bytes_on_a_device() -> None:
    """The state is the weights, momentum and counter of SGD, and the residuals of the 1-bit compressor.

    Each device has a residual of the whole gradient, and as a server one of 1/n of it.
    """
    leaves = jax.tree.leaves(make_problem(make_config(MLP), MLP).model.shapes)
    whole = 4 * sum(leaf.size for leaf in leaves)
    shards = 4 * sum(leaf.size // max(leaf.shape) * math.ceil(max(leaf.shape) / N) for leaf in leaves)
    padded = 4 * math.ceil(whole / 4 / N) * N  # for all parameters in one vector
    assert held(MLP, "ddp") == {"parameters": whole, "optimizer": whole + 4}
    for name in ("zero1", "zero2", "zero3"):
        assert held(MLP, name) == {"parameters": shards, "optimizer": shards + 4}
    own = padded + padded // N
    assert held(MLP, "byteps_onebit") == {"parameters": whole, "optimizer": whole + 4, "private": own}
    offloaded = {"parameters": shards, "optimizer on the host": shards + 4}
    assert held(MLP, "zero1", option("offload", True)) == offloaded


def test_the_bytes_of_a_master_and_of_the_others() -> None:
    strategy = make(MLP, *replicated("dp"))
    master, *others = audit.memory(strategy.compile(), strategy)
    whole = 4 * number_of_parameters(MLP)
    assert [master[name] for name in ("parameters", "optimizer")] == [(whole, whole), (whole + 4, whole + 4)]
    assert master["inputs"].nbytes == pytest.approx(N * whole, rel=0.02)  # the gradients of all devices
    for other in others:
        assert other["parameters"] == (whole, whole)
        assert "optimizer" not in other
        assert (other["inputs"].nbytes or 0) < whole / 10  # its shard of a batch


def test_bytes_of_a_pipelines_residuals() -> None:
    strategy = make(
        MLP, *pipeline("gpipe", 2, "--config.exchange=byteps_onebit", option("min_compress_bytes", 0), replicas=2)
    )
    memory = strategy.plan.memory[0]
    state = jax.eval_shape(strategy.init, jax.random.key(0))
    assert memory["private"] == sum(leaf.size * leaf.dtype.itemsize // 4 for leaf in jax.tree.leaves(state.private))


def test_planned_bytes_equal_those_of_the_arrays() -> None:
    for exchange in ("zero3", "byteps_onebit"):
        strategy = make(MLP, *replicated(exchange))
        state = strategy.init(jax.random.key(0))
        parts = {"parameters": state.params, "optimizer": state.optimizer.optimizer, "private": state.optimizer.private}
        first = {
            name: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(part))
            for name, part in parts.items()
            if jax.tree.leaves(part)
        }
        assert strategy.plan.memory == (first,) * N, exchange


# ---- the script -------------------------------------------------------------------------------------

SYNTHETIC = ["data.source=synthetic", "data.train=", "data.synthetic_examples=400", "num_steps=3"]
SMALL = [*SYNTHETIC, "model.name=mlp", "model.num_heads=None", "model.mlp_size=None", "model.hidden_size=64"]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    small = [*without_texts(small_arguments(folder)), *(f"--config.{key}" for key in SMALL)]
    return run_script(monkeypatch, command, "--config=configs/default.py", *small, *arguments)


def test_the_script_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "--config.exchange=byteps") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "not explained" not in captured.out
    [line] = [line for line in captured.out.splitlines() if line.startswith("reduce-scatter")]
    _, axis, dtype, number, nbytes, theory, ratio = line.split()
    assert (axis, dtype, float(number)) == ("data", "float32", 1)
    assert float(ratio) == pytest.approx(int(nbytes.replace(",", "")) / int(theory.replace(",", "")), abs=1e-3)
    lines = [line.split() for line in captured.out.splitlines()]
    assert ["memory", "on", "devices", "0,", "1", "bytes", "theory", "ratio"] in lines
    start = lines.index(["largest", "temporary", "arrays", "at", "the", "peak", "bytes", "layer", "and", "line"])
    assert len(lines[start + 1 :]) == audit_report.NUM_BUFFERS + 1
    rows = {line[0]: line[1:] for line in lines[start - 5 : start - 1]}
    assert list(rows) == ["parameters", "optimizer", "inputs", "temporary"]
    assert rows["parameters"][0] == rows["parameters"][1]
    assert rows["parameters"][2] == "1.0000"


def test_the_script_prints_json_and_fails_where_a_row_is_unexplained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["model", "layout", "collectives", "devices", "buffers"]
    [row] = [row for row in found["collectives"] if row["dtype"] != SCALARS]
    assert row["explained"]
    assert (row["kind"], row["axis"], row["dtype"], row["number"]) == (
        *("all-reduce", "data", "float32"),
        1,
    )
    # On 2 devices, the bytes sent equal the bytes of the gradients.
    parameters = found["devices"][0]["parameters"]
    assert row["theory"] == parameters["nbytes"] == parameters["theory"] == pytest.approx(row["nbytes"], rel=0.01)
    monkeypatch.setattr(audit, "TOLERANCE", -0.1)
    assert run(monkeypatch, tmp_path) == 1
    assert capsys.readouterr().out.count("not explained by theory") == 1


@pytest.mark.parametrize(("usable", "code"), [(100.0, 0), (99.0, 1)])
def test_the_script_fails_where_a_step_does_not_fit(
    usable: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    audited = {"collectives": [], "needed": {"arguments": 60, "temporary arrays": 40}, "usable_bytes": usable}
    monkeypatch.setattr(command, "find_target", lambda text: text)
    monkeypatch.setattr(command, "audit_run", lambda *_, **__: audited)
    assert run(monkeypatch, tmp_path, "--target=t4:8", "--json") == code


def test_the_script_prints_only_the_audit_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The progress of preparing the data, for example, is on stderr."""
    make_run = build.make_run

    def with_progress(*arguments: Any) -> Any:
        print("Counting")
        return make_run(*arguments)

    monkeypatch.setattr(build, "make_run", with_progress)
    assert run(monkeypatch, tmp_path, "--json") == 0
    captured = capsys.readouterr()
    assert "layout" in json.loads(captured.out)
    assert captured.err == "Counting\n"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("--config.exchang=ddp", "exchang"),
        ("--config.exchange=zero4", "config.exchange is 'zero4'"),
        ("--jsn", "--jsn"),
        ("--program", "--program is set; it must be set with --target"),
    ],
)
def test_the_script_reports_a_mistake_in_one_line(
    mistake: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, mistake) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


NEEDED: dict[str, tuple[tuple[str, ...], float]] = {  # state that the first program does not read, in parameters
    "ddp": (replicated("ddp"), 0),
    "dp": (replicated("dp"), 2),  # the moments of Adam, while the master computes a gradient
    # The same on the server, which adds up the gradients of an update.
    "sync": (("--config.strategy=async_data_parallel", "--config.asynchronous.policy=sync"), 2 + 1),
    "swarm": (("--config.strategy=swarm", "--config.swarm.stages=1"), 2),
}


@pytest.mark.parametrize("name", NEEDED)
def test_state_that_a_program_does_not_read(name: str) -> None:
    """The first program of a step computes a gradient or a stage's outputs; other state is in memory as well."""
    overrides, number = NEEDED[name]
    strategy, size = make(ADAM, WIDE, "--config.mesh.data=4", *overrides), number_of_parameters(ADAM, WIDE)
    needed = audit.needed_bytes(strategy.compile()[:1], strategy)
    assert needed["other state"] == pytest.approx(4 * number * size, rel=1e-4)
    read = (1 if number else 3) * 4 * size
    assert needed["arguments"] == pytest.approx(read, rel=0.02)


def test_activations_while_a_stage_is_dispatched() -> None:
    """Planned activations contain the results of F, and none is left for the exchange and the update."""
    pipeline = ("--config.strategy=pipeline", "--config.pipeline.executor=dispatch", "--config.mesh.stage=2")
    strategy = make(ADAM, WIDE, *pipeline, "--config.mesh.data=1", "--config.pipeline.num_microbatches=2")
    programs, of_both = strategy.compile(), strategy.plan.memory
    updates, reductions = (
        [one for one in programs if "private" in one.arguments and ("optimizer" in one.arguments) is is_update]
        for is_update in (True, False)
    )
    assert [audit.needed_bytes([one], strategy)["other state"] for one in updates] == [0, 0]
    for one, planned in zip(reductions, of_both, strict=True):
        others = planned["parameters"] + planned["optimizer"]
        assert audit.needed_bytes([one], strategy)["other state"] == others
    [forward] = (one for one in programs if one.calls[0].number == 1)
    needed, planned = audit.needed_bytes([forward], strategy), strategy.plan.memory[0]
    assert 0 < needed["results"] <= planned["stashes"] + planned["transfers"]
    assert needed["results"] + needed["other state"] == sum(planned.values()) - planned["parameters"]
