"""Draws the accuracy of asynchronous updates by their mean staleness, from scripts/bench/results/updates_bert.json.

scripts/python scripts/bench/staleness.py [--out=docs/staleness.png]
"""

import json
import sys
from typing import Any

from matplotlib.figure import Figure

from jaxpar.colors import CURVE_COLORS
from jaxpar.command_line import Parser, check_new_file, output_path
from jaxpar.compare.pictures import MARKERS
from jaxpar.compare.updates import STALENESS
from jaxpar.errors import exit_code
from scripts.bench.results import FOLDER

PICTURE = "docs/staleness.png"
SHOWN = ("sync", "softsync", "ssp", "async", "async+staleness_aware")


def main() -> None:
    """Draw the picture."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output_path, default=PICTURE, help="the picture")
    arguments = parser.parse()
    check_new_file("--out", arguments.out, [".png", ".svg"])
    result = json.loads((FOLDER / "updates_bert.json").read_text())
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, drawn = figure.subplots(), {}
    for place, (name, color) in enumerate(zip(SHOWN, CURVE_COLORS, strict=False)):
        for straggler in ("none", "4 times slower"):
            points = [
                (float(row[STALENESS].partition(",")[0]), float(row["test_accuracy"].rstrip("%")))
                for row in rows
                if (row["updates"], row["straggler"]) == (name, straggler)
            ]
            drawn[f"{name}, straggler {straggler}"] = points
            # Later points are smaller, and those with a straggler are hollow, so that equal points do not hide others.
            is_first = straggler == "none"
            style: dict[str, Any] = {"ms": (11 if is_first else 14) - 1.5 * place, "mew": 1.5, "color": color}
            style |= {"label": name.replace("+", " with ")} if is_first else {"mfc": "none"}
            axes.plot(*zip(*points, strict=True), MARKERS[place], **style)
    axes.plot([], [], "o", color="black", mfc="none", mew=1.5, label="hollow: one worker is 4 times slower")
    axes.axhline(12.29, color="black", linestyle=":", linewidth=1)
    axes.text(4.2, 11.5, "always predicting one class", fontsize=9, ha="center", va="top")
    axes.annotate(
        "async (both) and ssp", (6.9, 12.5), (6.9, 20), fontsize=9, ha="right", arrowprops={"arrowstyle": "-"}
    )
    axes.set(xlabel="mean staleness (updates that the weights of a gradient lack)", ylabel="test accuracy (%)", ylim=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="upper center", frameon=False)
    figure.savefig(arguments.out, dpi=150, metadata={"Description": json.dumps(drawn)})


if __name__ == "__main__":
    sys.exit(exit_code(main))
