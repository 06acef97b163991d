"""Language modelling: predicts the masked tokens of a text (Devlin et al. 2018), or the next token at each position.

Dims: B examples, T positions, D features, V vocabulary, P positions of predictions, K tokens of a prediction.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.data import Labels
from jaxpar.tasks import cross_entropy
from jaxpar.tasks.cross_entropy import ranked_choices
from jaxpar.tasks.task import Names, Prediction, Readable, Score, Task
from jaxpar.tasks.token_logits import TokenLogits


def masked_positions(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the positions of positive weight, int32 [B, P], followed by -1. P is a power of two, for few shapes."""
    is_masked_BT = batch["weights"] > 0
    most = int(is_masked_BT.sum(axis=1).max(initial=1))
    first_BP = np.argsort(~is_masked_BT, axis=1, kind="stable")[:, : 1 << (most - 1).bit_length()]
    return np.where(np.take_along_axis(is_masked_BT, first_BP, axis=1), first_BP, -1).astype(np.int32)


def last_positions(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the last position of each text, int32 [B, 1], where batch["mask"] is True for the last time."""
    return (batch["mask"].sum(axis=1, dtype=np.int32) - 1)[:, None]


def token_choices(logits: jax.Array | TokenLogits, batch: Mapping[str, jax.Array], top_k: int) -> dict[str, jax.Array]:
    """Return the `top_choices` [B, P, K] of the tokens at batch["positions"], without the logits elsewhere."""
    at_BP1 = jnp.maximum(batch["positions"], 0)[..., None]
    if isinstance(logits, TokenLogits):
        chosen = logits._replace(x=jnp.take_along_axis(logits.x, at_BP1, axis=1)).whole()
    else:
        chosen = jnp.take_along_axis(logits, at_BP1, axis=1)
    return cross_entropy.top_choices(chosen, top_k)


def fill_masks(readout: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return each text with its masked tokens filled in.

    A prediction is `{"text": "a good film", "tokens": [{"position": 2, "token": "good", "probability": 0.4}]}`, where
    a token can have `top`, as `ranked_choices` describes. Positions are counted from 0 and include special tokens.
    """
    texts: list[Prediction] = []
    for choices_PK, probabilities_PK, positions_P, tokens_T, mask_T in zip(
        readout["choices"], readout["probabilities"], batch["positions"], batch["inputs"], batch["mask"], strict=True
    ):
        filled_T = tokens_T.copy()
        tokens: list[Readable] = []
        for place, position in enumerate(positions_P[positions_P >= 0].tolist()):
            filled_T[position] = choices_PK[place, 0]
            choices = [names.decode([token]) for token in choices_PK[place].tolist()]
            tokens.append({"position": position, **ranked_choices("token", choices, probabilities_PK[place])})
        texts.append({"text": names.decode(filled_T[mask_T].tolist()), "tokens": tokens})
    return texts


def next_tokens(readout: Mapping[str, np.ndarray], _batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return the most likely token after each text: `{"next": " film", "probability": 0.4}`, and `top`, if any."""
    return [
        ranked_choices("next", [names.decode([token]) for token in choices_1K[0].tolist()], probabilities_1K[0])
        for choices_1K, probabilities_1K in zip(readout["choices"], readout["probabilities"], strict=True)
    ]


MASKED_LM = Task(
    name="masked_lm",
    labels=Labels.MASKED,
    head="masked_lm",
    terms=cross_entropy.TERMS,
    sums=cross_entropy.sums,
    metrics=cross_entropy.accuracy_and_perplexity,
    curve="accuracy",
    loss_unit="nats",
    rate_unit="tokens",
    headline="test perplexity {perplexity:.2f}",
    score=Score("perplexity", ".2f", is_exponential=True),
    positions=masked_positions,
    readout=token_choices,
    predictions=fill_masks,
    ranks_choices=True,
    result_keys={"perplexity": "perplexity"},
)
CAUSAL_LM = replace(
    MASKED_LM, name="causal_lm", labels=Labels.NEXT, head="causal_lm", positions=last_positions, predictions=next_tokens
)
