"""Token classification: predicts a tag for each word, such as named entities in IOB2 format.

Classes are ordered O, B-TYPE, I-TYPE, B-TYPE, I-TYPE, .... The prediction of a word is at its first token; all other
tokens have weight 0. Entities are defined as in the conlleval script of CoNLL
2000 and in seqeval's default mode: an entity begins at a B, or at an I that does not follow a B or I of the same type,
and ends before the first word that does not continue it. Programs count entities example by example, so the sums are
exact for every division of the batch.

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
    """The entities of a batch, at the positions of words."""

    ends_BT: jax.Array  # whether an entity ends at this position
    begins_BT: jax.Array  # position where the latest entity began
    types_BT: jax.Array  # type of the entity at this position, or -1 if there is none


def find_entities(classes_BT: jax.Array, is_word_BT: jax.Array) -> Entities:
    """Return the entities of classes_BT (int32) at the positions where is_word_BT (bool) is True."""
    length = classes_BT.shape[1]
    place_1T = jnp.arange(length)[None, :]
    types_BT = jnp.where(is_word_BT, (classes_BT - 1) // 2, -1)
    latest_BT = jax.lax.cummax(jnp.where(is_word_BT, place_1T, -1), axis=1)
    before_BT = jnp.pad(latest_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]  # the previous word
    type_before_BT = _at(types_BT, before_BT, before_BT >= 0, -1)
    is_inside_BT = types_BT >= 0
    starts_BT = is_inside_BT & ((classes_BT % 2 == 1) | (type_before_BT != types_BT))
    next_BT = jax.lax.cummin(jnp.where(is_word_BT, place_1T, length), axis=1, reverse=True)
    after_BT = jnp.pad(next_BT, ((0, 0), (0, 1)), constant_values=length)[:, 1:]  # the next word
    goes_on_BT = _at(is_inside_BT & ~starts_BT, after_BT, after_BT < length, False)
    begins_BT = jax.lax.cummax(jnp.where(starts_BT, place_1T, -1), axis=1)
    return Entities(is_inside_BT & ~goes_on_BT, begins_BT, types_BT)


def _at(x_BT: jax.Array, place_BT: jax.Array, is_there_BT: jax.Array, otherwise: int | bool) -> jax.Array:
    """Return x_BT at the positions place_BT of each example, and `otherwise` where is_there_BT is False."""
    return jnp.where(is_there_BT, jnp.take_along_axis(x_BT, jnp.where(is_there_BT, place_BT, 0), axis=1), otherwise)


def sums(logits_BTC: jax.Array, batch: Mapping[str, jax.Array]) -> Sums:
    """Return the sums of the cross entropy and of correct tags, and the numbers of actual, predicted, matched entities.

    batch: "labels", integers, and "weights", positive at words, both [B, T].
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
    """Return the fraction of correct tags, and micro-averaged precision, recall and F1 of entities; 0 if undefined."""
    actual, predicted, matched = (float(sums.terms[name]) for name in ("actual", "predicted", "matched"))
    return {
        **cross_entropy.accuracy(sums),
        "precision": matched / max(predicted, 1.0),
        "recall": matched / max(actual, 1.0),
        "f1": 2 * matched / max(actual + predicted, 1.0),
    }


def predictions(readout: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return the tag of each word and the entities of each example.

    A prediction is `{"tags": ["B-PER", "I-PER", "O"], "entities": [{"type": "PER", "start": 0, "stop": 2}]}`. Words are
    counted from 0, and `stop` is exclusive. Words are at the positions of positive weight.
    """
    examples: list[Prediction] = []
    for choices_T, weights_T in zip(readout["choices"], batch["weights"], strict=True):
        tags = [names.info.class_names[number] for number in choices_T[weights_T > 0]]
        examples.append({"tags": list[Readable](tags), "entities": list[Readable](read_entities(tags))})
    return examples


def read_entities(tags: Sequence[str]) -> list[dict[str, Readable]]:
    """Return the entities in the tags of an example (one tag per word), as defined at the top of this file."""
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
    headline="test entity-level F1 {test_f1:.2%}",
    score=Score("test_f1", ".2%"),
    readout=lambda logits_BTC, _batch, _top_k: {"choices": jnp.argmax(logits_BTC.astype(jnp.float32), axis=-1)},
    predictions=predictions,
)
