"""Every key of the config has an effect, or is refused with the key that would give it one."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.errors import UserError
from jaxpar.run import build
from jaxpar.run.unused import EFFECTS, SECTIONS, check_unused_keys, describe_unused, unused_keys
from tests.runs import refused, small_arguments

# Keys and sections that always have an effect, or that another check refuses if they have none.
ALWAYS = (
    *(
        "seed",
        "task",
        "strategy",
        "planned_for",
        "chosen",
        "mesh",
        "batch_size",
        "num_steps",
        "eval.batch_size",
        "checkpoint",
    ),
    *(
        "log",
        "watchdog_seconds",
        "elastic_seconds",
        "certify_every",
        "profile",
        "cache_dir",
        "early_stop.patience",
        "exchange",
        "exchange_options",
    ),
    *("model", "data.source", "data.train", "data.validation", "data.test", "data.class_weights", "data.num_threads"),
    *(f"optimizer.{key}" for key in ("name", "lr", "schedule", "warmup", "weight_decay", "clip_norm")),
    *("optimizer.accumulation_steps", "optimizer.nonfinite"),
)
MLP = ("model.name=mlp", "data.source=synthetic")
ASYNC, SWARM = ("strategy=async_data_parallel",), ("strategy=swarm",)
# A key with a value -> settings with which it has no effect, and settings with which it has one.
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "asynchronous.num_workers=2": ((), ASYNC),
    "asynchronous.delays.slowdown=3.0": (SWARM, ASYNC),
    "data_parallel.implementation=pmap": (("strategy=single",), ()),
    "swarm.stages=3": (("strategy=auto",), SWARM),
    "outer.worker=1": ((), ("outer.num_workers=2",)),
    "outer.lr=0.5": (("outer.num_workers=2", "outer.policy=local_sgd"), ("outer.num_workers=2",)),
    "outer.momentum=0.5": (("outer.num_workers=2", "outer.policy=local_sgd"), ("outer.num_workers=2",)),
    "outer.ratio=0.5": (("outer.num_workers=2",), ("outer.num_workers=2", "outer.compression=topk")),
    "outer.mix=0.1": (("outer.num_workers=2",), ("outer.num_workers=2", "outer.overlap_steps=2")),
    "swarm.rule=paper": (SWARM, (*SWARM, "swarm.rebalance_seconds=60")),
    "swarm.failures.rejoin=5.0": (SWARM, (*SWARM, "swarm.failures.lifetime=100")),
    "swarm.failures.groups=2": (
        (*SWARM, "swarm.failures.lifetime=100"),
        (*SWARM, "swarm.failures.group_lifetime=100"),
    ),
    "pipeline.partition=uniform": (("strategy=single",), SWARM),
    "pipeline.schedule=gpipe": (SWARM, ("strategy=auto",)),
    "pipeline.trace=1": ((), ("strategy=pipeline",)),
    "optimizer.momentum=0.8": ((), ("optimizer.name=sgd",)),
    "optimizer.b1=0.8": (("optimizer.name=sgd",), ("optimizer.name=lion",)),
    "optimizer.eps=1e-06": (("optimizer.name=lion",), ()),
    "optimizer.final_lr=0.1": (("optimizer.schedule=constant",), ()),
    "optimizer.max_skipped_steps=5": ((), ("optimizer.nonfinite=skip",)),
    "num_epochs=3.0": (("num_steps=5",), ()),
    "eval.every_steps=5": (("data.validation_fraction=0",), ()),
    "early_stop.min_delta=0.1": ((), ("early_stop.patience=2",)),
    "data.synthetic_examples=64": ((), ("data.source=synthetic",)),
    "data.max_length=16": (("model.name=vit", "data.source=synthetic"), ()),
    "data.augment=True": ((), ("model.name=vit", "data.source=synthetic")),
    "data.max_length=8": (MLP, ()),
    "data.length_buckets=(8, 16)": (("task=causal_lm", "model.name=gpt"), ()),
    "data.length_buckets=(8, 64)": (MLP, ()),
    "data.vocab_size=64": (("model.init_from=folder",), ()),
    "model.size=mini": (("model.init_from=folder",), ()),
    "data.mask_fraction=0.3": ((), ("task=masked_lm",)),
    "data.tokenizer=vocab.txt": (("data.source=synthetic",), ()),
    "data.text_columns=('a',)": (("data.source=wordnet",), ("data.source=csv",)),
    "data.label_column=a": (("task=regression",), ()),
    "data.target_columns=('a',)": ((), ("task=regression",)),
    "data.drop_unlabelled=True": (("task=causal_lm",), ()),
    "data.validation_fraction=0.2": (("data.source=csv", "data.validation=v.csv"), ()),
    "data.test_fraction=0.2": (("data.source=mnist",), ()),
    "data.prefetch=2": (("data.num_threads=0",), ()),
    "model.attention=xla": (MLP, ()),
}


def config_with(*settings: str) -> ConfigDict:
    config = configs.default_config()
    configs.override(config, [f"--config.{setting}" for setting in settings])
    return config


@pytest.mark.parametrize("setting", KEYS)
def test_a_key_without_effect_is_refused(setting: str) -> None:
    without, with_effect = KEYS[setting]
    key = setting.partition("=")[0]
    with pytest.raises(UserError, match=rf"config\.{key} is .*; it has no effect without "):
        check_unused_keys(config_with(*without, setting), {key})
    check_unused_keys(config_with(*without, setting), set())  # a config file may set it
    check_unused_keys(config_with(*with_effect, setting), {key})


def test_num_steps_takes_the_place_of_num_epochs() -> None:
    """A config with num_steps hides num_epochs; whoever adds num_steps to a command with num_epochs knows that."""
    check_unused_keys(config_with("num_steps=5", "num_epochs=3"), {"num_steps", "num_epochs"})


def test_a_default_value_without_effect_is_refused() -> None:
    """Whoever gives a key expects an effect, but for a zero or an empty value, which leaves something off."""
    config = config_with("strategy=single")
    check_unused_keys(config, {"pipeline.num_microbatches", "pipeline.trace", "early_stop.min_delta"})
    for key in ("pipeline.schedule", "optimizer.momentum"):
        with pytest.raises(UserError, match=rf"config\.{key} is .*; it has no effect without "):
            check_unused_keys(config, {key})


def test_every_key_is_listed_once() -> None:
    """A new key has a condition here, or always an effect."""
    conditional = [name for effect in (*SECTIONS, *EFFECTS) for name in effect.keys]
    tested = {setting.partition("=")[0] for setting in KEYS}
    for key in configs.keys(configs.default_config()):
        listed = [any(key == name or key.startswith(f"{name}.") for name in names) for names in (ALWAYS, conditional)]
        assert listed == [True, False] or listed == [False, True] or key.startswith("model."), key
    for effect in EFFECTS:
        assert tested & set(effect.keys), effect.keys
    for effect in SECTIONS:
        assert any(key == name or key.startswith(f"{name}.") for key in tested for name in effect.keys), effect.keys


def test_config_files_report_whole_sections() -> None:
    config = config_with("pipeline.schedule=gpipe", "pipeline.remat=full", "swarm.stages=3", "optimizer.momentum=0.8")
    assert describe_unused(config) == (
        "config.swarm.stages=3 (without config.strategy='swarm'); "
        "config.pipeline.remat='full', pipeline.schedule='gpipe' (without config.strategy='pipeline')"
    )
    assert list(unused_keys(config, ["optimizer.momentum", "optimizer.lr"])) == ["optimizer.momentum"]
    assert describe_unused(config_with("strategy=auto", "pipeline.schedule=gpipe")) == ""


def test_forgotten_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(tmp_path, tmp_path, ["--config.pipeline.schedule=gpipe"], capsys)
    expected = "config.pipeline.schedule is 'gpipe'; it has no effect without config.strategy='pipeline'"
    assert line == f"jaxpar: {expected}"


# Values out of range in sections that the run does not use.
WRONG = {
    "pipeline.schedule=banana": "must be one of",
    "pipeline.num_chunks=-1": "must be at least 0",
    "pipeline.replicas=x": "must list the number of devices",
    "pipeline.partition=banana": "must be one of uniform",
    "pipeline.remat=banana": "must be one of full, none, dots",
    "pipeline.bandwidth=-1": "must be bytes per second",
    "pipeline.memory_limit=inf": "must be the bytes of a device",
    "pipeline.profile=/nope": "must be the path of a profile",
    "pipeline.trace=-1": "must be a step number",
    "swarm.peers=nope.csv": "nope.csv",
    "swarm.patience=0": "must be 20.0 with config.swarm.mode='emulated'",
    "swarm.failures.rejoin=-1": "must be between",
    "asynchronous.num_workers=-3": "must be",
    "asynchronous.delays.jitter=-1": "must be",
    "data_parallel.implementation=banana": "must be one of auto",
    "data.tokenizer=/nope": "/nope",
    "data.mask_fraction=inf": "must be between 0 and 1",
    "data.max_length=-7": "config.data.max_length is -7; it must be at least 1",
    "data.length_buckets=(0,)": "must be at least one length",
    "profile=(0, 2)": "must be \\(first step, last step\\)",
    "num_epochs=-0.5": "num_epochs is -0.5; both must be finite and at least 0",
}


@pytest.mark.parametrize("setting", WRONG)
def test_values_are_checked_whatever_the_run_uses(setting: str, tmp_path: Path) -> None:
    config = config_with(*MLP, "strategy=single", "num_steps=5", setting)
    with pytest.raises(UserError, match=WRONG[setting]) as caught:
        build.check_run(config, tmp_path / "run")
    assert setting.partition("=")[0].rpartition(".")[2] in str(caught.value)


def test_small_run_has_no_unused_key(tmp_path: Path) -> None:
    config = configs.default_config()
    check_unused_keys(config, configs.override(config, small_arguments(tmp_path)))
