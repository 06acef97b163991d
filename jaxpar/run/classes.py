"""Reports how well a classifier predicts each class: a table, results for result.json, and confusion.png.

Dims: C classes.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpar import files
from jaxpar.errors import printable
from jaxpar.run.build import Result
from jaxpar.tasks.classification import class_metrics, majority, occurring_classes

MOST_ROWS = 12  # classes of a table that lists all classes
NUM_WORST = 8  # classes of any other table
WIDEST, TICK_WIDTH = 32, 20  # characters of the name of a class in a table and a picture; the rest is cut off
MOST_NUMBERS = 20  # classes of a picture with the number of examples in each cell
MOST_TICKS = 64  # names on an axis of the picture


def class_results(confusion_CC: np.ndarray, names: Sequence[str]) -> Result:
    """Return the majority baseline, the metrics of each class and the confusion matrix, for result.json."""
    metrics = class_metrics(confusion_CC)
    return {
        "test_majority_accuracy": majority(confusion_CC)[1],
        "test_classes": {
            name: {"precision": float(precision), "recall": float(recall), "f1": float(f1), "count": int(count)}
            for name, precision, recall, f1, count in zip(names, *metrics, strict=True)
        },
        "test_confusion": confusion_CC.astype(int).tolist(),
    }


def format_classes(confusion_CC: np.ndarray, names: Sequence[str]) -> str:
    """Return the majority baseline, and a table: of all classes if they are few, otherwise of those of lowest F1."""
    metrics, occurring = class_metrics(confusion_CC), occurring_classes(confusion_CC)
    shown = occurring
    if len(occurring) > MOST_ROWS:
        shown = occurring[np.argsort(metrics.f1_C[occurring], kind="stable")[:NUM_WORST]]
    common, accuracy = majority(confusion_CC)
    rows = [(_short(names[number]), *(of_metric[number] for of_metric in metrics)) for number in shown]
    left = len(occurring) - len(shown)
    if left:
        rows.append((f"and {left} of higher f1",))
    means = [of_metric[occurring].mean() for of_metric in metrics[:3]]
    rows.append(("macro average", *means, metrics.count_C.sum()))
    width = max(len(row[0]) for row in rows)
    lines = [
        f"baseline  accuracy {accuracy:.4f}, always predicting {_short(names[common])}",
        f"classes   {'':{width}}  precision  recall      f1  examples",
    ]
    for name, *values in rows:
        numbers = "{:10.4f} {:7.4f} {:7.4f} {:9,}".format(*values) if values else ""
        lines.append(f"{'':9} {name:{width}} {numbers}".rstrip())
    if unmeasured := sorted(set(range(len(names))) - set(occurring.tolist())):
        listed = ", ".join(_short(names[number]) for number in unmeasured[:NUM_WORST])
        rest = len(unmeasured) - NUM_WORST
        lines.append(f"{'':9} without test examples: {listed}{f' and {rest} more' if rest > 0 else ''}")
    return "\n".join(lines)


def draw_confusion(path: Path, confusion_CC: np.ndarray, names: Sequence[str]) -> None:
    """Draw the confusion matrix: the colour of a cell is its fraction of the examples of the actual class.

    The colours differ in lightness, which readers with colour blindness see as well. They change fastest near 0, so
    that rare errors are visible.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure  # imported here because the import takes almost a second

    num_classes, count_C1 = len(confusion_CC), confusion_CC.sum(axis=1, keepdims=True)
    fraction_CC = confusion_CC / np.maximum(count_C1, 1)
    side = float(np.clip(0.28 * num_classes + 2.5, 4.5, 14))
    figure = Figure(figsize=(1.15 * side, side), layout="compressed")
    axis = figure.subplots()
    image = axis.imshow(fraction_CC, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    ticks = range(0, num_classes, -(-num_classes // MOST_TICKS))
    labels = [_short(names[number], TICK_WIDTH) for number in ticks]
    size = 9 if num_classes <= MOST_NUMBERS else 7
    for of_axis, angle in ((axis.xaxis, 90), (axis.yaxis, 0)):
        of_axis.set_ticks(ticks, labels, rotation=angle, fontsize=size, parse_math=False)
    if num_classes <= MOST_NUMBERS:
        for (actual, predicted), count in np.ndenumerate(confusion_CC):
            colour = "white" if fraction_CC[actual, predicted] > 0.4 else "black"
            text = f"{count:,.0f}" if count else ""
            axis.text(predicted, actual, text, ha="center", va="center", color=colour, fontsize=8)
    axis.set(xlabel="predicted class", ylabel="actual class")
    figure.colorbar(image, ax=axis, shrink=0.8, fraction=0.05, label="fraction of the actual class")
    path.unlink(missing_ok=True)  # a link is replaced, not followed
    with files.naming(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # drawn as a box
        figure.savefig(path, dpi=120, bbox_inches="tight")  # the layout alone can cut off the labels of a square


def _short(name: str, width: int = WIDEST) -> str:
    """Return the name of a class in one line of at most `width` characters."""
    name = printable(name)
    return name if len(name) <= width else f"{name[: width - 3]}..."
