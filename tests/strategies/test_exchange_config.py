"""Invalid exchanges and exchange options are refused in one line, before anything is written or compiled."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar import cluster
from tests.runs import refused

POSITIVE, SHARE = "it must be greater than 0", "it must be greater than 0 and at most 1"
SINGLE = ["strategy=single", "mesh.data=1"]
PIPELINE = ["strategy=pipeline", "mesh.stage=2", "mesh.data=2", "pipeline.num_microbatches=2"]
MISTAKES = {
    "an unknown exchange": (
        ["exchange=bytegrad"],
        ["config.exchange is 'bytegrad'; it must be one of ddp, dp, horovod", "Did you mean 'bagua_bytegrad'?"],
    ),
    "a near exchange": (["exchange=hovorod"], ["config.exchange is 'hovorod'", "Did you mean 'horovod'?"]),
    "an unknown exchange of a pipeline": (
        [*PIPELINE, "exchange=byteps_onebits"],
        ["config.exchange is 'byteps_onebits'", "Did you mean 'byteps_onebit'?"],
    ),
    "an option of another exchange": (
        ["exchange=ddp", "ratio=0.1"],
        [
            "config.exchange_options.ratio is 0.1; it must be None with exchange 'ddp', whose options are "
            "bucket_bytes, wire_dtype, algorithm"
        ],
    ),
    "an option of dp": (
        ["exchange=dp", "bucket_bytes=1000"],
        ["options.bucket_bytes is 1000", "'dp', which has no options"],
    ),
    "passes of another exchange": (
        ["exchange=byteps", "backward_passes_per_step=2"],
        ["backward_passes_per_step is 2; it must be None with exchange 'byteps', whose options are bucket_bytes"],
    ),
    "a wire_dtype": (
        ["wire_dtype=float8"],
        ["options.wire_dtype is 'float8'; it must be one of float16, bfloat16, float8_e4m3fn, float8_e5m2"],
    ),
    "an algorithm of float8": (
        ["exchange=horovod", "wire_dtype=float8_e5m2", "algorithm=ring"],
        ["options.algorithm is 'ring'; it must be None with wire_dtype='float8_e5m2', whose sums are in float32"],
    ),
    "float8 of lossy exchanges": (
        ["exchange=bagua_bytegrad", "wire_dtype=float8_e5m2"],
        ["options.wire_dtype is 'float8_e5m2'; it must be None with exchange 'bagua_bytegrad'"],
    ),
    "an algorithm": (["algorithm=tree"], ["options.algorithm is 'tree'; it must be one of psum, ring"]),
    "no bytes": (["bucket_bytes=0"], ["options.bucket_bytes is 0", POSITIVE]),
    "less bytes than none": (["exchange=zero1", "bucket_bytes=-5"], ["options.bucket_bytes is -5", POSITIVE]),
    "no number of bytes": (["bucket_bytes=many"], ["options.bucket_bytes is 'many'; it must be an integer"]),
    "no group": (["group=0"], ["options.group is 0", POSITIVE]),
    "an indivisible group": (["group=3"], ["options.group is 3; it must divide the number of replicas, 4"]),
    "a group that is too large": (["group=8"], ["options.group is 8; it must divide the number of replicas, 4"]),
    "momentum that is not used": (
        ["exchange=byteps_onebit", "momentum=0.9", "group=4"],
        ["options.momentum is 0.9; it must be 0 with group=4, the number of replicas"],
    ),
    "a ring with groups": (
        ["algorithm=ring", "group=2"],
        ["options.algorithm is 'ring'; it must be 'psum' with group=2"],
    ),
    "predivide": (
        ["exchange=horovod", "predivide=0"],
        ["options.predivide is 0.0; it must be between 0.0001 and 10000"],
    ),
    "an infinite predivide": (
        ["exchange=horovod", "predivide=inf"],
        ["options.predivide is inf; it must be between 0.0001 and 10000"],
    ),
    "no pass": (
        ["exchange=horovod_adasum", "backward_passes_per_step=0"],
        ["options.backward_passes_per_step is 0", POSITIVE],
    ),
    "no interval": (
        ["exchange=bagua_model_average", "interval=0"],
        ["options.interval is 0; it must be between 1 and 2147483647"],
    ),
    "no share": (["exchange=byteps_topk", "ratio=0"], ["options.ratio is 0.0", SHARE]),
    "more than all": (["exchange=byteps_randomk", "ratio=1.5"], ["options.ratio is 1.5", SHARE]),
    "not a number": (["exchange=byteps_randomk", "ratio=nan"], ["options.ratio is nan", "must be a number"]),
    "a negative warm-up": (["exchange=onebit_adam", "warmup=-0.1"], ["options.warmup is -0.1", "less than 1"]),
    "a long warm-up": (["exchange=bagua_qadam", "warmup=5"], ["options.warmup is 5.0", "less than 1"]),
    "a warm-up of the whole run": (["exchange=powersgd", "warmup=1"], ["options.warmup is 1.0", "less than 1"]),
    "a mean of one pass": (
        ["exchange=horovod", "average_aggregated_gradients=True"],
        ["average_aggregated_gradients is True", "without exchange_options.backward_passes_per_step of at least 2"],
    ),
    "no rank": (["exchange=powersgd", "rank=0"], ["options.rank is 0", POSITIVE]),
    "a block of floats": (
        ["exchange=zero3", "block=64"],
        ["options.block is 64; it must be None with exchange 'zero3' without quantized_weights or quantized_gradients"],
    ),
    "momentum": (
        ["exchange=byteps_onebit", "momentum=1.1"],
        ["options.momentum is 1.1", "it must be between 0.0 and 0.9999"],
    ),
    "no level": (["exchange=byteps_dithering", "levels=0"], ["options.levels is 0; it must be between 1 and 127"]),
    "a negative seed": (
        ["exchange=byteps_randomk", "seed=-1"],
        ["options.seed is -1; it must be between 0 and 2147483647"],
    ),
    "a long interval": (
        ["exchange=bagua_model_average", "interval=3000000000"],
        ["options.interval is 3000000000; it must be between 1 and 2147483647"],
    ),
    "levels": (["exchange=byteps_dithering", "levels=128"], ["options.levels is 128; it must be between 1 and 127"]),
    "a block": (["exchange=bagua_bytegrad", "block=-1"], ["options.block is -1; it must be between 0 and 2147483648"]),
    "adasum on 3": (
        ["exchange=horovod_adasum", "mesh.data=3"],
        ["config.exchange is 'horovod_adasum' with 3 replicas; their number must be a power of 2"],
    ),
    "decentralized on 3": (
        ["exchange=bagua_decentralized", "mesh.data=3"],
        ["config.exchange is 'bagua_decentralized' with 3 replicas; their number must be even"],
    ),
    "an odd number of groups": (
        ["exchange=bagua_decentralized", "group=2", "mesh.data=6"],
        ["config.exchange is 'bagua_decentralized' with 6 replicas in groups of 2; the number of groups must be even"],
    ),
    "one group": (
        ["exchange=bagua_low_precision_decentralized", "group=4"],
        ["options.group is 4; it must be less than the number of replicas, 4, because groups send to other groups"],
    ),
    "groups with all peers": (
        ["exchange=bagua_decentralized", "group=2", "peers=all"],
        ["options.group is 2; it must be 1 with peers='all', which averages with all replicas"],
    ),
    "other peers": (
        ["exchange=bagua_decentralized", "peers=ring"],
        ["exchange_options.peers is 'ring'; it must be one of shift_one, all"],
    ),
    "zero with lamb": (
        ["exchange=zero1", "optimizer.name=lamb"],
        ["config.optimizer.name is 'lamb'", "config.exchange='zero1'", "it must be one of adamw, sgd, lion"],
    ),
    "zero with adafactor": (
        ["exchange=zero3", "optimizer.name=adafactor"],
        ["config.optimizer.name is 'adafactor'", "config.exchange='zero3'", "it must be one of adamw, sgd, lion"],
    ),
    "zero with muon": (["exchange=zero2", "optimizer.name=muon"], ["config.optimizer.name is 'muon'", "whole arrays"]),
    "onebit_adam with sgd": (
        ["exchange=onebit_adam", "optimizer.name=sgd"],
        ["config.optimizer.name is 'sgd'; it must be adamw with config.exchange='onebit_adam'"],
    ),
    "bagua_qadam with lion": (
        ["exchange=bagua_qadam", "optimizer.name=lion"],
        ["config.optimizer.name is 'lion'; it must be adamw with config.exchange='bagua_qadam'"],
    ),
    "onebit_adam with muon": (
        ["exchange=onebit_adam", "optimizer.name=muon"],
        [
            "config.optimizer.name is 'muon'; it must be adamw with config.exchange='onebit_adam', which computes the "
            "update of AdamW itself"
        ],
    ),
    "single": (
        [*SINGLE, "exchange=horovod"],
        ["config.exchange is 'horovod'; it must be 'ddp' without options with config.strategy='single'"],
    ),
    "an option with single": (
        [*SINGLE, "bucket_bytes=1000"],
        ["config.exchange is 'ddp bucket_bytes=1000'; it must be 'ddp' without options", "config.strategy='single'"],
    ),
    "sharding": (
        ["exchange=zero1", "data_parallel.implementation=sharding"],
        [
            "config.data_parallel.implementation is 'sharding', with which XLA sums the gradients",
            "it must be 'auto' or 'shard_map' with",
            "config.exchange='zero1'",
        ],
    ),
    "sharding in bfloat16": (
        ["data_parallel.implementation=sharding", "model.dtype=bfloat16"],
        [
            "config.data_parallel.implementation is 'sharding'",
            "'bfloat16'; it must be one of auto, shard_map, pmap",
        ],
    ),
    "an option with pmap": (
        ["group=2", "data_parallel.implementation=pmap"],
        ["config.data_parallel.implementation is 'pmap'", "it must be 'auto' or 'shard_map' with", "'ddp group=2'"],
    ),
    "zero3 in lockstep": (
        [*PIPELINE, "exchange=zero3", "pipeline.executor=lockstep"],
        [
            "config.exchange is 'zero3', which has collectives in each action; it must be one of ddp, horovod, byteps",
            "bagua_bytegrad, zero1 with config.pipeline.executor='lockstep'",
        ],
    ),
    "zero2 of pipelines without a flush, whose replicas cannot use horovod's ring": (
        [*PIPELINE, "pipeline.schedule=pipedream", "exchange=zero2", "pipeline.executor=dispatch"],
        [
            "config.exchange is 'zero2', which shards the state that a flush updates",
            "it must be one of ddp, byteps, byteps_onebit",
            "with config.pipeline.schedule='pipedream'",
        ],
    ),
    "offload in pipelines": (
        [*PIPELINE, "exchange=zero1", "offload=True"],
        ["options.offload is True; it must be False with config.strategy='pipeline'"],
    ),
    "averaged passes of pipelines": (
        [*PIPELINE, "exchange=horovod", "average_aggregated_gradients=True"],
        ["config.exchange_options.average_aggregated_gradients is True; it must be None"],
    ),
    "onebit_adam of pipelines": (
        [*PIPELINE, "exchange=onebit_adam"],
        [
            "config.exchange is 'onebit_adam', which wraps the optimizer of the whole model",
            "it must be one of ddp, horovod",
        ],
    ),
    "dp of pipelines": (
        [*PIPELINE, "exchange=dp"],
        ["config.exchange is 'dp', which holds the whole model on one device; it must be one of ddp, horovod"],
    ),
    "passes of pipelines": (
        [*PIPELINE, "exchange=horovod", "backward_passes_per_step=2"],
        ["backward_passes_per_step", "config.pipeline.num_microbatches", "config.strategy='pipeline'"],
    ),
    "a group of pipelines": (
        [*PIPELINE, "group=4"],
        ["options.group is 4; it must divide the number of replicas, 2"],
    ),
    "offload": (
        ["exchange=zero2", "offload=True"],
        ["options.offload is True; it must be False on a platform without pinned host memory, such as cpu"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_in_one_line_and_leave_nothing(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, messages = MISTAKES[name]
    if name == "offload":
        found = replace(cluster.find_cluster(), has_pinned_host_memory=False)
        monkeypatch.setattr(cluster, "find_cluster", lambda: found)
    whole = ("exchange=", "strategy=")
    keys = [text if text.startswith(whole) or "." in text.partition("=")[0] else _option(text) for text in overrides]
    arguments = ["--config.mesh.data=4", *(f"--config.{key}" for key in keys)]
    line = refused(folder, tmp_path, arguments, capsys)
    for message in messages:
        assert message in line


def _option(text: str) -> str:
    return f"exchange_options.{text}"
