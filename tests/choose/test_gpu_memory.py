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
SCANNED_ZERO1 = {"gathers_whole": True, "is_scanned": True, "is_sent": True}
SCANNED_ZERO2 = SCANNED_ZERO1 | {"scatters_layers": True}
SCANNED_ZERO3 = {"gathers_layers": True, "is_scanned": True}


class FixedSizes(Layers):
    """An embedding, two equal blocks and a head, which save less with rematerialization."""

    remats = ("none", "full")

    def __init__(self, looped: float = 0.0, saved: float = 0.0) -> None:
        self._looped, self._saved = looped, (SAVED[0], SAVED[1] + saved, *SAVED[2:])

    def profile(self, _size: int, _remat: str) -> list[LayerProfile]:
        return [LayerProfile("layer", 0.0, 0.0, OUTPUT, 0.0, weight) for weight in WEIGHTS]

    def memory(self, _size: int, _remat: str, *, is_split: bool) -> list[LayerMemory]:
        assert not is_split
        return [LayerMemory(0.0, narrowed) for narrowed in NARROWED]

    def residuals(self, _size: int, remat: str) -> list[Residuals]:
        saved = self._saved if remat == "none" else (1.0,) * 4
        return [
            Residuals(nbytes + STACKED, nbytes, self._looped * (number == 3)) for number, nbytes in enumerate(saved)
        ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Embedding: what it saved and works with, and all gradients. Copies of later layers are not needed any more.
        ({}, 1 + (1 + 3) + 96),
        # A scan stacks the gradients of both blocks in the dtype in which they read their weights.
        ({"is_scanned": True}, 1 + (1 + 3) + (60 + 4 + 4 + 20)),
        ({"remat": "full"}, 1 + (1 + 3) + 96),
        ({"remat": "full", "is_scanned": True}, 1 + (1 + 3) + (60 + 4 + 4 + 20)),
        # At the end of a step that sends them, they are also in float32, with a copy of the embedding.
        ({"is_scanned": True, "is_sent": True}, (60 + 4 + 4 + 20) + (8 + 8) + 60),
        # zero1: the gathered embedding is needed again only if the backward pass computes it again.
        (SCANNED_ZERO1, (60 + 4 + 4 + 20) + (8 + 8) + 60),
        ({"gathers_whole": True}, 1 + (1 + 3) + 96),
        ({"gathers_whole": True, "remat": "full"}, 60 + 1 + (1 + 3) + 96),
        # zero2, a quarter of the gradients of the blocks.
        (SCANNED_ZERO2, 1 + (1 + 3) + 60 + (8 + 8) / 4 + 20),
        # If the blocks save much, the peak is there, with the copies of both, and one of their gradients is whole.
        (SCANNED_ZERO2 | {"saved": 90.0}, 4 + 4 + (1 + 95) + STACKED + (95 + 3) + (8 + 8) / 4 + 8 + 20),
        # The loss of the head computes the gradient that it saves in place.
        ({"looped": LOOPED}, (4 + 4 + 10) + (1 + 5 + 5) + LOOPED),
        # zero3, a quarter of the state: head: gathered with the block before, and stacks of both blocks and of their
        # gradients; its gradient is among what it saved, and exists twice in a loop that alternates between buffers.
        # The embedding: in float32, with its gradient.
        (SCANNED_ZERO3 | {"looped": 2 * LOOPED}, (1 + 5 + 5 + 2) + 2 * STACKED + 2 * LOOPED + 10 + 4 + 8),
        # With a message for each layer, the packed gradient of the head is a copy, and there is one stack of shards.
        (
            SCANNED_ZERO3 | {"packs_layers": True, "looped": 2 * LOOPED},
            (1 + 5 + 5 + 2) + 2 * STACKED + 2 * LOOPED + 10 + 4 + 4 + 20,
        ),
        (SCANNED_ZERO3, 1 + (1 + 3) + 2 * 60 + 2 * 4 + (8 + 8 + 20) / 4),
        # The same without stacks.
        ({"gathers_layers": True, "looped": 2 * LOOPED}, (1 + 5 + 5) + 2 * LOOPED + 10 + 4),
        ({"gathers_layers": True}, 1 + (1 + 3) + 2 * 60 + (8 + 8 + 20) / 4),
    ],
)
def test_a_replica(settings: dict[str, Any], expected: float) -> None:
    flags = {"is_scanned": False, "is_accumulated": False} | settings
    layers = FixedSizes(flags.pop("looped", 0.0), flags.pop("saved", 0.0))
    remat = flags.pop("remat", "none")
    shards = {"gathers_layers", "scatters_layers"} & set(flags)
    state = STATE._replace(gradients=24.0) if shards else STATE
    assert replica_bytes(layers, MODEL, state, 4, remat, **flags) == 3000 + expected


@pytest.mark.parametrize(("remat", "working"), [("none", 100), ("full", 100 + 30)])
def test_the_gradients_of_scores(remat: str, working: float) -> None:
    """The peak has them, if they exceed what a layer saves, and with rematerialization the probabilities."""

    class WithScores(FixedSizes):
        def residuals(self, size: int, remat: str) -> list[Residuals]:
            first, *others = super().residuals(size, remat)
            return [first._replace(probabilities=30.0, score_gradients=100.0), *others]

    flags = {"is_scanned": False, "is_accumulated": False}
    assert replica_bytes(WithScores(), MODEL, STATE, 4, remat, **flags) == 3000 + 1 + (working + 3) + 96


def test_a_scan_holds_all_its_gradients() -> None:
    """While the last block is computed, the gradients of both exist, unless the layers are unrolled."""
    blocks: Any = SimpleNamespace(runs=(range(0, 4),))
    scanned, unrolled = (
        replica_bytes(FixedSizes(), blocks, STATE, 4, "none", is_scanned=is_scanned, is_accumulated=False)
        for is_scanned in (True, False)
    )
    whole = 60  # of the first one, which reads float32 and is stacked, too
    gradients = 60 + 4 + 4 + 10  # in the dtypes in which the blocks read their weights
    assert scanned == 3000 + 18 + whole + (1 + 5 + 5) + 3 * STACKED + (5 + 3) + gradients
    assert unrolled == 3000 + 1 + (1 + 3) + 96
