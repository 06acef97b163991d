"""The colors of curves, also as the colour-blind see them."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import jaxpar.use.pages
from jaxpar.colors import CURVE_COLORS

# Machado et al., "A Physiologically-Based Model for Simulation of Color Vision Deficiency", 2009, severity 1.0.
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # sRGB, D65
WHITE = np.array([0.9505, 1.0, 1.089])
LEAST = 15  # distance in CIELAB, where 2.3 is just noticeable
PAGE = (Path(jaxpar.use.pages.__file__).parent / "page.html").read_text()
LIGHT, DARK = (
    re.findall(r"--(?:c\d|faint): (#[0-9a-f]{6})", part) for part in PAGE.split("</style>")[0].split("@media")[:2]
)


def lab(color: str, sight: list[list[float]] | None) -> np.ndarray:
    """Return L, a and b of a color."""
    encoded = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = linear if sight is None else np.array(sight) @ linear
    xyz = TO_XYZ @ np.clip(seen, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", [None, DEUTERANOPIA, PROTANOPIA], ids=["all", "deuteranopia", "protanopia"])
@pytest.mark.parametrize("colors", [CURVE_COLORS, LIGHT, DARK], ids=["pictures", "page", "dark"])
def test_colors_differ(colors: list[str], sight: list[list[float]] | None) -> None:
    assert len(colors) >= 7
    for one, other in itertools.combinations(colors, 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > LEAST, f"{one} and {other}"
