"""Language modelling: predicts the masked tokens of a text (Devlin et al. 2018), or the next token at each position.

Dims: B examples, T positions, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxpar.data import Labels
from jaxpar.tasks import cross_entropy
from jaxpar.tasks.task import Names, Prediction, Readable, Score, Task


def fill_masks(logits_BTV: np.ndarray, batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return each text with its masked tokens filled in.

    A prediction is `{"text": "a good film", "tokens": [{"position": 2, "token": "good", "probability": 0.4}]}`.
    Positions with positive weight are filled in. They are counted from 0 and include special tokens.
    """
    texts: list[Prediction] = []
    for logits_TV, tokens_T, weights_T, mask_T in zip(
        logits_BTV, batch["inputs"], batch["weights"], batch["mask"], strict=True
    ):
        positions = np.flatnonzero(weights_T > 0)
        chosen, probabilities = cross_entropy.best_choices(logits_TV[positions])
        filled_T = tokens_T.copy()
        filled_T[positions] = chosen
        tokens: list[Readable] = [
            {"position": int(position), "token": names.decode([int(token)]), "probability": float(probability)}
            for position, token, probability in zip(positions, chosen, probabilities, strict=True)
        ]
        texts.append({"text": names.decode(filled_T[mask_T].tolist()), "tokens": tokens})
    return texts


def next_tokens(logits_BTV: np.ndarray, batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return the most likely token after each text: `{"next": " film", "probability": 0.4}`.

    A text ends at its last True position in batch["mask"], bool [B, T]; without a mask, at position T - 1.
    """
    mask_BT = batch["mask"] if "mask" in batch else np.ones(logits_BTV.shape[:2], bool)
    last_BV = np.take_along_axis(logits_BTV, mask_BT.sum(axis=1)[:, None, None] - 1, axis=1)[:, 0]
    tokens_B, probabilities_B = cross_entropy.best_choices(last_BV)
    return [
        {"next": names.decode([int(token)]), "probability": float(probability)}
        for token, probability in zip(tokens_B, probabilities_B, strict=True)
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
    headline="test perplexity {perplexity:.2f}",
    score=Score("perplexity", ".2f", is_exponential=True),
    predictions=fill_masks,
    result_keys={"perplexity": "perplexity"},
)
CAUSAL_LM = replace(MASKED_LM, name="causal_lm", labels=Labels.NEXT, head="causal_lm", predictions=next_tokens)
