"""Finds keys that were set although they have no effect, such as config.pipeline.schedule without a pipeline.

On the command line this is a mistake, often a forgotten config.strategy, and it is refused. A config file may set keys
of several strategies, of which a run uses one. A run reports those of whole sections, such as config.pipeline.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import tasks
from jaxpar.data import synthetic
from jaxpar.data.check import TABLES
from jaxpar.data.examples import Labels
from jaxpar.data.images import IMAGE_READERS
from jaxpar.errors import UserError

TRANSFORMERS = ("bert", "gpt", "vit")
OTHER_MODELS = ("resnet", "mlp")  # that ship with jaxpar; a user's own model may read any key


class Effect(NamedTuple):
    """The condition under which keys have an effect."""

    keys: tuple[str, ...]  # the keys; a section stands for all keys in it
    holds: Callable[[ConfigDict], bool]  # whether they have an effect
    needs: str  # what would give them one, as the end of `it has no effect without`
    but: str = ""  # a key of the section for which this does not hold
    instead: str = ""  # a key that takes the place of these: whoever gives both expects that


def _if_one_of(keys: tuple[str, ...], key: str, *values: object, also: tuple[str, ...] = ()) -> Effect:
    """Return the effect of keys if another one has one of these values, or one that the message does not name."""
    *others, last = map(repr, values)
    named = f"{', '.join(others)} or {last}" if others else last
    return Effect(keys, lambda config: _value(config, key) in (*values, *also), f"config.{key}={named}")


def _if_positive(keys: tuple[str, ...], key: str) -> Effect:
    return Effect(keys, lambda config: _value(config, key) > 0, f"config.{key}")


def _value(config: ConfigDict, key: str) -> Any:
    return functools.reduce(lambda section, name: section[name], key.split("."), config)


def _labels(*kinds: Labels) -> Callable[[ConfigDict], bool]:
    return lambda config: tasks.find_task(config).labels in kinds


def _is_image(config: ConfigDict) -> bool:
    source = config.data.source
    return source in IMAGE_READERS or (source == "synthetic" and synthetic.kind(config) == "image")


def _is_text(config: ConfigDict) -> bool:
    source = config.data.source
    return source not in IMAGE_READERS and (source != "synthetic" or synthetic.kind(config) == "text")


def _from_files(config: ConfigDict) -> bool:
    return config.data.source not in (*IMAGE_READERS, "synthetic")


SECTIONS = (
    _if_one_of(("asynchronous",), "strategy", "async_data_parallel"),
    # The planner keeps what is set of the strategies that it chooses from.
    _if_one_of(("data_parallel",), "strategy", "data_parallel", also=("auto",)),
    _if_one_of(("swarm",), "strategy", "swarm"),
    _if_positive(("outer",), "outer.num_workers"),
    # A swarm cuts its stages by pipeline.partition.
    _if_one_of(("pipeline.partition",), "strategy", "pipeline", "swarm", also=("auto",)),
    _if_one_of(("pipeline",), "strategy", "pipeline", also=("auto",))._replace(but="pipeline.partition"),
)
EFFECTS = (
    _if_one_of(("outer.lr", "outer.momentum"), "outer.policy", "diloco"),
    _if_one_of(("outer.ratio",), "outer.compression", "topk"),
    _if_positive(("outer.mix",), "outer.overlap_steps"),
    _if_positive(("swarm.rule",), "swarm.rebalance_seconds"),
    Effect(
        ("swarm.failures.rejoin",),
        lambda config: bool(config.swarm.failures.lifetime or config.swarm.failures.group_lifetime),
        "config.swarm.failures.lifetime or group_lifetime",
    ),
    _if_positive(("swarm.failures.groups", "swarm.failures.group_share"), "swarm.failures.group_lifetime"),
    _if_one_of(("optimizer.momentum",), "optimizer.name", "sgd", "muon"),
    _if_one_of(("optimizer.b1", "optimizer.b2"), "optimizer.name", "adamw", "lamb", "lion", "muon"),
    _if_one_of(("optimizer.eps",), "optimizer.name", "adamw", "lamb", "muon"),
    Effect(
        ("optimizer.final_lr",),
        lambda config: config.optimizer.schedule != "constant",
        "config.optimizer.schedule='cosine' or 'linear'",
    ),
    _if_one_of(("optimizer.max_skipped_steps",), "optimizer.nonfinite", "skip"),
    _if_one_of(("num_epochs",), "num_steps", 0)._replace(instead="num_steps"),
    Effect(
        ("eval.every_steps",),
        lambda config: bool(config.data.validation or config.data.validation_fraction > 0),
        "a validation split (config.data.validation, or a config.data.validation_fraction above 0)",
    ),
    _if_positive(("early_stop.min_delta",), "early_stop.patience"),
    _if_one_of(("data.synthetic_examples",), "data.source", "synthetic"),
    Effect(("data.augment",), _is_image, "data of images"),
    Effect(("data.max_length", "data.length_buckets"), _is_text, "data of texts"),
    Effect(
        ("data.length_buckets",),
        lambda config: tasks.find_task(config).labels is not Labels.NEXT,
        "padding, and config.task='causal_lm' has none: its blocks have config.data.max_length tokens",
    ),
    _if_one_of(("model.size",), "model.init_from", ""),
    Effect(
        ("data.vocab_size",),
        lambda config: _is_text(config) and not (config.data.tokenizer or config.model.init_from),
        "a tokenizer that the run trains (data of texts, config.data.tokenizer='' and config.model.init_from='')",
    ),
    Effect(("data.mask_fraction",), _labels(Labels.MASKED), "config.task='masked_lm'"),
    Effect(("data.tokenizer",), _from_files, "texts from files"),
    Effect(
        ("data.text_columns",),
        lambda config: config.data.source in TABLES,
        f"config.data.source={', '.join(map(repr, TABLES))}",
    ),
    Effect(
        ("data.label_column",),
        lambda config: _from_files(config) and _labels(Labels.CLASSES, Labels.TAGS)(config),
        "a column of labels (config.task='classification' or 'token_classification', and texts from files)",
    ),
    Effect(("data.target_columns",), _labels(Labels.TARGETS), "config.task='regression'"),
    Effect(
        ("data.drop_unlabelled",),
        lambda config: _from_files(config) and _labels(Labels.CLASSES, Labels.TAGS, Labels.TARGETS)(config),
        "columns of labels or targets",
    ),
    _if_one_of(("data.validation_fraction",), "data.validation", ""),
    Effect(
        ("data.test_fraction",),
        lambda config: not config.data.test and config.data.source not in IMAGE_READERS,
        "config.data.test='', and data without test files of its own",
    ),
    _if_positive(("data.prefetch",), "data.num_threads"),
    Effect(
        ("model.attention", "model.flatten_positions", "model.recompute_activations"),
        lambda config: config.model.name not in OTHER_MODELS,
        f"a transformer (config.model.name={', '.join(map(repr, TRANSFORMERS))})",
    ),
)
EVERY_EFFECT = (*SECTIONS, *EFFECTS)


def unused_keys(
    config: ConfigDict, keys: Collection[str], effects: Collection[Effect] = EVERY_EFFECT
) -> dict[str, Effect]:
    """Return, for each of the keys that has no effect, the condition that does not hold."""
    found: dict[str, Effect] = {}
    for key in keys:
        for effect in effects:
            is_covered = key != effect.but and any(key == name or key.startswith(f"{name}.") for name in effect.keys)
            if is_covered and not effect.holds(config):
                found.setdefault(key, effect)
    return found


def check_unused_keys(config: ConfigDict, given: Collection[str], effects: Collection[Effect] = EVERY_EFFECT) -> None:
    """Raise UserError if one of the given keys has no effect. given: the keys that the command line sets.

    A key that is given its default value, which is zero or empty, leaves something off, and is accepted.
    """
    values, changed = configs.keys(config), configs.changed_keys(config)
    for key, effect in unused_keys(config, given, effects).items():
        if (values[key] or key in changed) and effect.instead not in given:
            raise UserError(f"config.{key} is {values[key]!r}; it has no effect without {effect.needs}")


def describe_unused(config: ConfigDict) -> str:
    """Return the keys of whole sections that are set without effect, formatted; empty if there are none."""
    changed, words = configs.changed_keys(config), []
    for effect in SECTIONS:
        named = [f"{key}={changed[key]!r}" for key in unused_keys(config, changed, (effect,))]
        words += [f"config.{', '.join(named)} (without {effect.needs})"] if named else []
    return "; ".join(words)
