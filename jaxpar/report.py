"""What a run leaves behind: result.json and the curves as a picture."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from jaxpar import files, metrics


def write_result(workdir: Path, result: dict[str, Any]) -> None:
    """Writes workdir/result.json."""
    files.write_text(workdir / "result.json", json.dumps(result, indent=2) + "\n")


def draw_curves(workdir: Path, title: str) -> Path | None:
    """Draws loss and accuracy by step from metrics.jsonl as workdir/curves.png. None where there is nothing to draw."""
    rows = metrics.read(workdir)
    if not rows:
        return None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        for split, style in (("train", "-"), ("validation", "o--"), ("test", "*")):
            points = [(row["step"], row[name]) for row in rows if row["split"] == split and name in row]
            if points:
                size = 12 if split == "test" else 5
                axis.plot(*zip(*points, strict=True), style, label=f"{split} {points[-1][1]:.3f}", ms=size, lw=1.3)
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats)" if name == "loss" else name)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    path = workdir / "curves.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
