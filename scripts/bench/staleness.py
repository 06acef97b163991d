"""Draws the accuracy of asynchronous updates by their mean staleness, from scripts/bench/results/updates_bert.json.

scripts/python scripts/bench/staleness.py [--out=docs/staleness.png]
"""

import json
import sys

from matplotlib.figure import Figure

from jaxpar.command_line import Parser, output_path
from jaxpar.compare.pictures import CURVE_COLORS
from jaxpar.errors import exit_code
from scripts.bench.results import FOLDER

SHOWN = ("sync", "softsync", "ssp", "async", "async+staleness_aware")


def main() -> None:
    """Draw the picture."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output_path, default="docs/staleness.png", help="the picture")
    arguments = parser.parse()
    result = json.loads((FOLDER / "updates_bert.json").read_text())
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, color in zip(SHOWN, CURVE_COLORS, strict=False):
        points = [
            (float(row["staleness"].partition(",")[0]), float(row["test_accuracy"].rstrip("%")))
            for row in rows
            if row["updates"] == name
        ]
        axes.plot(*zip(*points, strict=True), "o", color=color, label=name.replace("+", " with "))
    axes.axhline(12.29, color="black", linestyle=":", linewidth=1)
    axes.text(0.1, 13.2, "always predicting one class", fontsize=8)
    axes.set(xlabel="mean staleness (updates that the weights of a gradient lack)", ylabel="test accuracy (%)", ylim=0)
    axes.legend(fontsize=8)
    figure.savefig(arguments.out, dpi=150)


if __name__ == "__main__":
    sys.exit(exit_code(main))
