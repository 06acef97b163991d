"""The memory of replicas on GPUs, added up by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.choose.costs.layers import LayerMemory, Layers
from jaxpar.choose.costs.memory import StateBytes, replica_bytes
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.measure.operations import Residuals

WEIGHTS, SAVED, NARROWED = (60.0, 8.0, 8.0, 20.0), (1.0, 5.0, 5.0, 2.0), (0.0, 4.0, 4.0, 10.0)
MODEL: Any = SimpleNamespace(runs=(range(0, 1), range(1, 3), range(3, 4)))
OUTPUT, LOOPED, STACKED = 3.0, 100.0, 0.5  # STACKED: what a scan saves in addition
STATE = StateBytes(1000.0, 2000.0, 96.0)
SCANNED_ZERO3 = {"gathers_layers": True, "is_scanned": True}


class FixedSizes(Layers):
    """An embedding, two equal blocks and a head, which save less with rematerialization."""

    remats = ("none", "full")

    def __init__(self, looped: float = 0.0) -> None:
        self._looped = looped

    def profile(self, _size: int, _remat: str) -> list[LayerProfile]:
        return [LayerProfile("layer", 0.0, 0.0, OUTPUT, 0.0, weight) for weight in WEIGHTS]

    def memory(self, _size: int, _remat: str, *, is_split: bool) -> list[LayerMemory]:
        assert not is_split
        return [LayerMemory(0.0, narrowed) for narrowed in NARROWED]

    def residuals(self, _size: int, remat: str) -> list[Residuals]:
        saved = SAVED if remat == "none" else (1.0,) * 4
        return [
            Residuals(nbytes + STACKED, nbytes, self._looped * (number == 3)) for number, nbytes in enumerate(saved)
        ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # All narrow copies; embedding: what it saved and works with, and all gradients.
        ({}, 18 + 1 + (1 + 3) + 96),
        ({"is_scanned": True}, 18 + 1 + (1 + 3) + 96),
        ({"remat": "full"}, 18 + 1 + (1 + 3) + 96),
        # With rematerialization, a scan stacks the whole weights of both blocks.
        ({"remat": "full", "is_scanned": True}, 18 + (8 + 8 - 4 - 4) + 1 + (1 + 3) + 96),
        ({"is_accumulated": True}, 18 + 1 + (1 + 3) + 96 + 96),
        # The head in chunks, whose gradient is among what it saved; all layers hold what they saved.
        ({"looped": LOOPED}, 18 + (1 + 5 + 5 + 2) + LOOPED),
        ({"looped": LOOPED, "remat": "full"}, 18 + 4 + LOOPED),
        # Both blocks are stacked.
        ({"looped": LOOPED, "is_scanned": True}, 18 + (1 + 5 + 5 + 2) + 2 * STACKED + LOOPED),
        # zero3, a quarter of the state: head: gathered with the block before, and stacks of both blocks and of their
        # gradients; its gradient is among what it saved. The embedding: in float32, with its gradient.
        (SCANNED_ZERO3 | {"looped": 2 * LOOPED}, (1 + 5 + 5 + 2) + 2 * STACKED + 2 * LOOPED + 10 + 4 + 8),
        (SCANNED_ZERO3, 1 + (1 + 3) + 2 * 60 + 2 * 4 + (8 + 8 + 20) / 4),
        # The same without stacks.
        ({"gathers_layers": True, "looped": 2 * LOOPED}, (1 + 5 + 5 + 2) + 2 * LOOPED + 10 + 4),
        ({"gathers_layers": True}, 1 + (1 + 3) + 2 * 60 + (8 + 8 + 20) / 4),
    ],
)
def test_a_replica(settings: dict[str, Any], expected: float) -> None:
    flags = {name: settings.get(name, False) for name in ("is_scanned", "is_accumulated", "gathers_layers")}
    state = STATE._replace(gradients=24.0) if flags["gathers_layers"] else STATE
    layers, remat = FixedSizes(settings.get("looped", 0.0)), settings.get("remat", "none")
    assert replica_bytes(layers, MODEL, state, 4, remat, **flags) == 3000 + expected


@pytest.mark.parametrize(("remat", "working"), [("none", 100), ("full", 100 + 30)])
def test_the_gradients_of_scores(remat: str, working: float) -> None:
    """The peak has them, if they exceed what a layer saves, and with rematerialization the probabilities."""

    class WithScores(FixedSizes):
        def residuals(self, size: int, remat: str) -> list[Residuals]:
            first, *others = super().residuals(size, remat)
            return [first._replace(probabilities=30.0, score_gradients=100.0), *others]

    flags = {"is_scanned": False, "is_accumulated": False, "gathers_layers": False}
    assert replica_bytes(WithScores(), MODEL, STATE, 4, remat, **flags) == 3000 + 18 + 1 + (working + 3) + 96


def test_a_scan_holds_all_its_gradients() -> None:
    """While the last block is computed, the gradients of both exist, unless the layers are unrolled."""
    blocks: Any = SimpleNamespace(runs=(range(0, 4),))
    flags = {"is_accumulated": False, "gathers_layers": False}
    scanned, unrolled = (
        replica_bytes(FixedSizes(), blocks, STATE, 4, "none", is_scanned=is_scanned, **flags)
        for is_scanned in (True, False)
    )
    whole = 60  # of the first one, which reads float32 and is stacked, too
    assert scanned == 3000 + 18 + whole + (1 + 5 + 5) + 3 * STACKED + (5 + 3) + 96
    assert unrolled == 3000 + 18 + 1 + (1 + 3) + 96
