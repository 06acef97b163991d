"""Ring algorithms of collectives: what a device sends. Needs no JAX.

The devices form a ring, and each sends to the next one. A vector is cut into as many chunks as there are devices, and
each pass around the ring sends all of them but one (Patarasuk and Yuan, 2009).
"""

RING_PASSES = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}
PERMUTE = "collective-permute"
RING_COLLECTIVES = (*RING_PASSES, PERMUTE)


def ring_sends(passes: int, size: int, nbytes: float, num_vectors: int = 1) -> tuple[float, int]:
    """Return the bytes and the messages that each of `size` devices sends.

    nbytes: bytes of all vectors together, each of which is sent in separate messages.
    """
    steps = passes * (size - 1)
    return steps * nbytes / size, steps * num_vectors


def sent_of_operand(kind: str, size: int) -> float:
    """Return the bytes that a device sends in a collective of `size` devices / bytes of its operand."""
    if kind == PERMUTE:
        return 1.0
    vector = float(size) if kind == "all-gather" else 1.0  # of which the operand is one chunk
    return ring_sends(RING_PASSES[kind], size, vector)[0]
