"""Draws which replicas send what to which others with each family of exchanges, on four replicas.

scripts/python scripts/bench/topologies.py [--out=docs/exchanges.png]

The bytes are those of the plans that docs/reference/exchanges.md lists.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from jaxpar.colors import CURVE_COLORS
from jaxpar.command_line import Parser, check_new_file, output_path
from jaxpar.errors import exit_code
from scripts import reference

PICTURE = "docs/exchanges.png"
N = reference.REPLICAS
PLACES = [(-1.0, 1.0), (1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)]
RADIUS = 0.28
PAIRS = list(itertools.permutations(range(N), 2))
RING = [(i, (i + 1) % N) for i in range(N)]
BLUE, ORANGE = CURVE_COLORS[1:3]

Arrows = Sequence[tuple[int, int]]  # (from, to)


class Family(NamedTuple):
    """A panel of the picture."""

    title: str
    exchange: str  # whose bytes are shown
    arrows: Arrows
    later: Arrows = ()  # drawn dashed: those of a second phase
    note: str = "each sends"
    group: int | None = None  # the option `group` of the exchange
    hosts: Sequence[Sequence[int]] = ()  # replicas that are drawn in one box


FAMILIES = (
    Family("dp: a master", "dp", [pair for pair in PAIRS if 0 in pair], note="the master sends"),
    Family("ddp, horovod: all-reduce in a ring", "ddp", RING),
    Family("byteps, zero1, zero2: each owns a shard", "zero1", PAIRS),
    Family("hsdp: within hosts, then between them", "hsdp", [(0, 1), (1, 0), (2, 3), (3, 2)],
           [(0, 2), (2, 0), (1, 3), (3, 1)], group=2, hosts=[(0, 1), (2, 3)]),
    Family("bagua_decentralized: with one other", "bagua_decentralized", [(0, 2), (2, 0), (1, 3), (3, 1)],
           [(0, 3), (3, 0), (1, 2), (2, 1)]),
    Family("bagua_model_average: every few steps", "bagua_model_average", [], RING, note="on average, each sends"),
)  # fmt: skip


def main() -> None:
    """Draw the picture."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output_path, default=PICTURE, help="the picture")
    arguments = parser.parse()
    check_new_file("--out", arguments.out, [".png", ".svg"])
    unit = reference.sent("ddp") / (2 * (N - 1) / N)  # the bytes of the parameters, which a ring sends 2 (n - 1) / n of
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, family in zip(figure.subplots(2, 3).flat, FAMILIES, strict=True):
        sent = reference.sent(family.exchange, family.group) / unit
        draw(axes, family, f"{family.note} {sent:.3g} P")
    figure.savefig(arguments.out, dpi=150)


def draw(axes: Axes, family: Family, label: str) -> None:
    """Draw a panel."""
    for host in family.hosts:
        xs, ys = zip(*(PLACES[i] for i in host), strict=True)
        corner, size = (min(xs) - 0.45, min(ys) - 0.45), (max(xs) - min(xs) + 0.9, max(ys) - min(ys) + 0.9)
        axes.add_patch(FancyBboxPatch(corner, *size, boxstyle="round,pad=0.05", fc="none", ec="gray"))
    for arrows, style in ((family.arrows, {"color": BLUE}), (family.later, {"color": ORANGE, "ls": (0, (3, 2))})):
        draw_arrows(axes, arrows, style)
    for number, place in enumerate(PLACES):
        axes.text(*place, str(number), ha="center", va="center", fontsize=12,
                  bbox={"boxstyle": "circle,pad=0.35", "fc": "white", "ec": "black"})  # fmt: skip
    axes.set_title(family.title, fontsize=11)
    axes.text(0, -1.75, label, ha="center", va="top", fontsize=11)
    axes.set(xlim=(-1.7, 1.7), ylim=(-2.1, 1.6), aspect="equal")
    axes.set_axis_off()


def draw_arrows(axes: Axes, arrows: Iterable[tuple[int, int]], style: dict[str, Any]) -> None:
    """Draw arrows between replicas. Those there and back run side by side."""
    for start, end in arrows:
        (x, y), (to_x, to_y) = PLACES[start], PLACES[end]
        length = math.hypot(to_x - x, to_y - y)
        dx, dy = (to_x - x) / length, (to_y - y) / length
        aside_x, aside_y = 0.07 * dy, -0.07 * dx
        axes.annotate(
            "",
            (to_x - RADIUS * dx + aside_x, to_y - RADIUS * dy + aside_y),
            (x + RADIUS * dx + aside_x, y + RADIUS * dy + aside_y),
            arrowprops={"arrowstyle": "->", "lw": 1.6, **style},
        )


if __name__ == "__main__":
    sys.exit(exit_code(main))
