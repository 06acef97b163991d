"""Regression: predicts one or more numbers for each example, trained by least squares.

Dims: B examples, K targets.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxpar.data import Labels
from jaxpar.tasks.task import Names, Prediction, Score, Sums, Task, mean_loss


def make_regression(config: ConfigDict) -> Task:
    """Return the task for the targets in config.data.target_columns."""
    shape = (len(config.data.target_columns),)
    return Task(
        name="regression",
        labels=Labels.TARGETS,
        head="example",
        terms={"errors": shape, "squares": shape, "targets": shape},
        sums=sums,
        metrics=metrics,
        curve="r2",
        loss_unit="mean squared error",
        headline="test RMSE {test_rmse:.4g}, R2 {test_r2:.4f}",
        score=Score("test_r2", ".4f"),
        readout=lambda outputs_BK, _batch, _top_k: {"values": outputs_BK},
        predictions=predictions,
    )


def sums(outputs_BK: jax.Array, batch: Mapping[str, jax.Array]) -> Sums:
    """Return the weighted sums over the batch of the squared error, averaged over targets, and of terms by target.

    batch: "labels", float32 [B, K], and "weights" [B].
    """
    labels_BK, weights_B1 = batch["labels"], batch["weights"][:, None]
    errors_K = jnp.sum(jnp.square(outputs_BK.astype(jnp.float32) - labels_BK) * weights_B1, axis=0)
    terms = {
        "errors": errors_K,
        "squares": jnp.sum(jnp.square(labels_BK) * weights_B1, axis=0),
        "targets": jnp.sum(labels_BK * weights_B1, axis=0),
    }
    return Sums(jnp.mean(errors_K), terms, jnp.sum(batch["weights"]))


def predictions(readout: Mapping[str, np.ndarray], _batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return the predicted numbers of each example by column name: `{"stars": 4.5, "price": 12.25}`."""
    return [dict(zip(names.info.targets, map(float, values_K), strict=True)) for values_K in readout["values"]]


def metrics(sums: Sums) -> dict[str, float]:
    """Return the root mean squared error over all targets, and R2, averaged over targets.

    R2 is 0 for a constant target. A target counts as constant if its variance is within the rounding error of its sum
    of squares, which is computed in float32.
    """
    errors_K, squares_K, targets_K = (np.asarray(sums.terms[name]) for name in ("errors", "squares", "targets"))
    spread_K = squares_K - targets_K**2 / sums.weight
    varies_K = spread_K > 1e-6 * squares_K
    r2_K = np.where(varies_K, 1 - errors_K / np.where(varies_K, spread_K, 1), 0)
    return {"rmse": math.sqrt(mean_loss(sums.loss, sums.weight)), "r2": float(r2_K.mean())}
