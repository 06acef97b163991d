"""Tests the report on the classes of a classifier: table, results and picture."""

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxpar.run import classes

CONFUSION = np.array([[3, 1, 0], [0, 0, 0], [2, 2, 4]], float)


def test_results() -> None:
    assert classes.class_results(CONFUSION, ("a", "b", "c")) == {
        "test_majority_accuracy": 8 / 12,
        "test_classes": {
            "a": {"precision": 3 / 5, "recall": 3 / 4, "f1": 6 / 9, "count": 4},
            "b": {"precision": 0, "recall": 0, "f1": 0, "count": 0},
            "c": {"precision": 1, "recall": 1 / 2, "f1": 8 / 12, "count": 8},
        },
        "test_confusion": [[3, 1, 0], [0, 0, 0], [2, 2, 4]],
    }


def test_table_of_few_classes_keeps_their_order() -> None:
    """Class x has no examples, but was predicted; class y does not occur."""
    matrix = np.array([[3, 1, 0, 0], [0, 0, 0, 0], [2, 2, 4, 0], [0, 0, 0, 0]], float)
    text = classes.format_classes(matrix, ("first\n\x1b[31m", "x", "a name that is longer than a line should be", "y"))
    assert text.splitlines() == [
        "baseline  accuracy 0.6667, always predicting a name that is longer than a ...",
        "classes                                     precision  recall      f1  examples",
        "          first\\n\\x1b[31m                      0.6000  0.7500  0.6667         4",
        "          x                                    0.0000  0.0000  0.0000         0",
        "          a name that is longer than a ...     1.0000  0.5000  0.6667         8",
        "          macro average                        0.5333  0.4167  0.4444        12",
        "          without test examples: y",
    ]


def test_table_of_many_classes_shows_the_worst() -> None:
    """Class n has n correct answers of 40, and as many predictions as examples; class 20 does not occur."""
    matrix = np.zeros((21, 21))
    for number in range(20):
        matrix[number, number] = number
        matrix[number, (number + 1) % 20] = 40 - number
    lines = classes.format_classes(matrix[::-1, ::-1], [f"c{number}" for number in range(20, -1, -1)]).splitlines()
    assert [line.split()[0] for line in lines[2:-3]] == [f"c{number}" for number in range(8)]
    assert lines[-3] == "          and 12 of higher f1"
    assert lines[-2].split()[:2] == ["macro", "average"]
    assert lines[-2].split()[-1] == "800"
    assert lines[-1] == "          without test examples: c20"


@pytest.mark.parametrize("num_classes", [2, 10, 45, 200])
def test_picture(num_classes: int, tmp_path: Path) -> None:
    """Warnings are errors here, also those about letters that the font lacks."""
    matrix = np.eye(num_classes) * 9
    matrix[0, 1], matrix[1, 1] = 9, 0
    path = tmp_path / "confusion.png"
    path.symlink_to(tmp_path / "elsewhere")
    classes.draw_confusion(path, matrix, ["$x_{1$", "中文", *map(str, range(num_classes))][:num_classes])
    assert not path.is_symlink()
    height, width, _ = matplotlib.image.imread(path).shape
    assert 400 < height < width < 2000


@pytest.mark.parametrize("num_classes", [2, 3, 12, 45])
def test_all_labels_are_in_the_picture(num_classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig

    def savefig(self: Figure, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        figures.append(self)

    monkeypatch.setattr(Figure, "savefig", savefig)
    names = [f"name of the class {number}" for number in range(num_classes)]
    classes.draw_confusion(tmp_path / "confusion.png", np.eye(num_classes), names)
    [figure] = figures
    height, width, _ = matplotlib.image.imread(tmp_path / "confusion.png").shape
    needed = figure.get_tightbbox()
    assert needed.width * 120 <= width
    assert needed.height * 120 <= height


def test_colours_are_fractions_of_the_rows(tmp_path: Path) -> None:
    """In both rows, 3 of 4 examples are in the first column, so each column has one colour."""
    classes.draw_confusion(tmp_path / "confusion.png", np.array([[300, 100], [3, 1]], float), ("a", "b"))
    pixels = matplotlib.image.imread(tmp_path / "confusion.png")[:, :, :3].reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    large = colours[counts > 0.05 * len(pixels)]
    assert len(large) == 3  # two cells of each of two colours, and the background
