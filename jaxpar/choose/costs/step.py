"""The costs of a training step, and the communication that it waits for: what replicas and pipelines share."""

from typing import NamedTuple

from jaxpar.choose.costs.memory import StateBytes
from jaxpar.core.mesh import CONTEXT, TENSOR
from jaxpar.core.plan import Traffic

CASTS = 6.0  # bytes that casts of float32 weights in both passes read and write, for each byte in a narrower dtype
# The assumed part of the time of collectives between products (tensor axis) that is hidden: for each pair of products,
# the backward pass gathers the positions again while it computes their gradient, and scatters that while it computes
# those of the kernels. For the other three of five collectives, the next operation waits.
HIDDEN_BETWEEN_PRODUCTS = 0.4


class StepCosts(NamedTuple):
    """The predicted time of a step, in seconds, and the memory of the fullest device."""

    seconds: float  # the whole step
    compute: float  # forward and backward passes of the busiest device
    waiting: float  # waiting of that device for other stages
    exposed: float  # communication during which it does not compute
    update: float  # the update of the parameters, packing included
    nbytes: float  # bytes that the device needs
    # those of them that are state; the others are activations, and what the computation of a layer needs
    state: StateBytes = StateBytes(0.0, 0.0, 0.0)
    packing: float = 0.0  # copies of gradients and parameters into and out of messages

    def overheads(self) -> dict[str, float]:
        """Return the seconds of what is not computing, in disjoint parts: waiting, exposed, packing and update."""
        return {
            "waiting": self.waiting,
            "exposed": self.exposed,
            "packing": self.packing,
            "update": self.update - self.packing,
        }


class UpdateWork(NamedTuple):
    """The bytes that an update moves and holds on a device, and the time to launch it."""

    exchange: float  # bytes that are moved to pack, add up and compress gradients
    update: float  # bytes that the optimizer moves
    from_host: float = 0.0  # bytes of the optimizer state that a step copies from the host, and back
    held: float = 0.0  # those that the device holds meanwhile, besides its part of the state: `Plan.update_bytes`
    launching: float = 0.0  # seconds in which a GPU launches its kernels


def sent_by_layers(sent: Traffic) -> bool:
    """Return whether layers wait for a collective: on the context axis, gradients are summed after them."""
    return sent.axis == TENSOR or (sent.axis == CONTEXT and sent.kind != "all-reduce")


def exposed_of_layers(
    gather: float, again: float, reduce: float, forward: float, backward: float, hidden: float, end: float
) -> float:
    """Return the exposed seconds of collectives that are sent for each layer while a device computes others.

    gather, again, reduce: the seconds of the gathers in the forward pass, of those in the backward pass, and of all
    reductions, which use the same links; forward, backward: of computing; hidden: those of computing while gradients
    are sent; end: the share of the first layers, which are gathered before anything can be computed, and whose
    gradients are sent when nothing is left to compute.
    """
    of_backward = max(again + reduce - backward, reduce - hidden, reduce * end)
    return max(gather - forward, gather * end) + of_backward
