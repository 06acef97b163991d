"""A tag for each word: named entities, in IOB2.

Classes are numbered O, B-TYPE, I-TYPE, B-TYPE, I-TYPE, ..: what follows needs no names. A word is read at its first
token; no other token has a weight. Entities are those of the script conlleval of CoNLL 2000 and of seqeval's default
mode: one begins at B, and at an I that does not follow B or I of its type; it ends before a word that does not go on
with it. They are counted example by example inside of programs, so their sums are exact however a batch is divided.

Dims: B examples, T positions, C classes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.data import Labels
from jaxpar.tasks import cross_entropy
from jaxpar.tasks.task import Names, Prediction, Readable, Score, Sums, Task


class Entities(NamedTuple):
    """Entities of a batch, at the positions of words.

    Attributes:
      ends_BT: whether one ends there.
      begins_BT: where the latest one began.
      types_BT: its type; -1: none.
    """

    ends_BT: jax.Array
    begins_BT: jax.Array
    types_BT: jax.Array


def find_entities(classes_BT: jax.Array, is_word_BT: jax.Array) -> Entities:
    """Return the entities of classes, int32, at words, bool; other positions are passed over."""
    length = classes_BT.shape[1]
    place_1T = jnp.arange(length)[None, :]
    types_BT = jnp.where(is_word_BT, (classes_BT - 1) // 2, -1)
    latest_BT = jax.lax.cummax(jnp.where(is_word_BT, place_1T, -1), axis=1)
    before_BT = jnp.pad(latest_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]  # the word before
    type_before_BT = _at(types_BT, before_BT, before_BT >= 0, -1)
    is_inside_BT = types_BT >= 0
    starts_BT = is_inside_BT & ((classes_BT % 2 == 1) | (type_before_BT != types_BT))
    next_BT = jax.lax.cummin(jnp.where(is_word_BT, place_1T, length), axis=1, reverse=True)
    after_BT = jnp.pad(next_BT, ((0, 0), (0, 1)), constant_values=length)[:, 1:]  # the word after
    goes_on_BT = _at(is_inside_BT & ~starts_BT, after_BT, after_BT < length, False)
    begins_BT = jax.lax.cummax(jnp.where(starts_BT, place_1T, -1), axis=1)
    return Entities(is_inside_BT & ~goes_on_BT, begins_BT, types_BT)


def _at(x_BT: jax.Array, place_BT: jax.Array, is_there_BT: jax.Array, otherwise: int | bool) -> jax.Array:
    """The values of each row at places of it."""
    return jnp.where(is_there_BT, jnp.take_along_axis(x_BT, jnp.where(is_there_BT, place_BT, 0), axis=1), otherwise)


def sums(logits_BTC: jax.Array, batch: Mapping[str, jax.Array]) -> Sums:
    """Return the sums of cross entropy and right tags, and the numbers of entities: actual, predicted, and both.

    Args:
      logits_BTC: any float dtype; computed in float32.
      batch: "labels", integers, and "weights", [B, T]; positive at the words.
    """
    sums = cross_entropy.sums(logits_BTC, batch)
    is_word_BT = batch["weights"] > 0
    actual = find_entities(batch["labels"], is_word_BT)
    predicted = find_entities(jnp.argmax(logits_BTC.astype(jnp.float32), axis=-1), is_word_BT)
    is_matched_BT = actual.ends_BT & predicted.ends_BT & (actual.begins_BT == predicted.begins_BT)
    is_matched_BT &= actual.types_BT == predicted.types_BT
    counts = {"actual": actual.ends_BT, "predicted": predicted.ends_BT, "matched": is_matched_BT}
    return sums._replace(terms=sums.terms | {name: jnp.sum(where, dtype=jnp.float32) for name, where in counts.items()})


def metrics(sums: Sums) -> dict[str, float]:
    """Return the share of right tags, and precision, recall and F1 of entities, micro-averaged; 0 where undefined."""
    actual, predicted, matched = (float(sums.terms[name]) for name in ("actual", "predicted", "matched"))
    return {
        **cross_entropy.accuracy(sums),
        "precision": matched / max(predicted, 1.0),
        "recall": matched / max(actual, 1.0),
        "f1": 2 * matched / max(actual + predicted, 1.0),
    }


def predictions(logits_BTC: np.ndarray, batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return the tag of each word, and the entities; words are numbered from 0, `stop` is the first one behind.

    `{"tags": ["B-PER", "I-PER", "O"], "entities": [{"type": "PER", "start": 0, "stop": 2}]}`. Words are read at the
    positions of positive weight.
    """
    examples: list[Prediction] = []
    for logits_TC, weights_T in zip(logits_BTC, batch["weights"], strict=True):
        tags = [names.info.class_names[number] for number in logits_TC[weights_T > 0].argmax(axis=-1)]
        examples.append({"tags": list[Readable](tags), "entities": list[Readable](read_entities(tags))})
    return examples


def read_entities(tags: Sequence[str]) -> list[dict[str, Readable]]:
    """Return the entities of an example's tags, one tag a word, by the rules at the top of this file."""
    entities: list[dict[str, Readable]] = []
    kind_before = ""
    for place, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        if prefix == "I" and kind == kind_before:
            entities[-1]["stop"] = place + 1
        elif kind:
            entities.append({"type": kind, "start": place, "stop": place + 1})
        kind_before = kind
    return entities


TASK = Task(
    name="token_classification",
    labels=Labels.TAGS,
    head="token",
    terms={**cross_entropy.TERMS, "actual": (), "predicted": (), "matched": ()},
    sums=sums,
    metrics=metrics,
    curve="f1",
    loss_unit="nats",
    headline="test F1 {test_f1:.2%} by entity",
    score=Score("test_f1", ".2%"),
    predictions=predictions,
)
