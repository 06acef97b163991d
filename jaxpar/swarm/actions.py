"""Actions of peers in a run of a swarm, in order: with them, real peers can repeat a simulated run exactly.

The routing table lists the passes. The actions also contain the messages that arrive, and the failures.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpar.swarm.ledger import BACKWARD_PASS, FORWARD_PASS

RECEIVE_INPUT, RECEIVE_GRADIENT, FAILURE = 2, 3, 4  # kinds of actions, besides FORWARD_PASS and BACKWARD_PASS
RECEIVE = (RECEIVE_INPUT, RECEIVE_GRADIENT)  # by value: STAGE_INPUT, OUTPUT_GRADIENT


class SwarmAction(NamedTuple):
    """An action of a peer. Actions are in order of time: of passes, when they end, and of messages, when they arrive.

    Attributes:
      kind: FORWARD_PASS or BACKWARD_PASS; RECEIVE_INPUT: receive the input of the stage; RECEIVE_GRADIENT: receive the
        gradient of its output; or FAILURE: lose everything.
      microbatch: the microbatch of the step; -1 in a failure.
      stage: the stage; -1 in a failure.
      peer: the peer.
      source: the peer that sent a message; -1 if there is none.
      is_counted: whether the gradient of a backward pass is accumulated; false if it is repeated only for its output.
    """

    kind: int
    microbatch: int = -1
    stage: int = -1
    peer: int = -1
    source: int = -1
    is_counted: bool = False


def num_messages(actions: Sequence[Sequence[SwarmAction]]) -> Counter[int]:
    """Return the number of activations and gradients that peers send to each other, by the stage before the link."""
    messages = (action for step in actions for action in step if action.kind in RECEIVE)
    return Counter(action.stage - (action.kind == RECEIVE_INPUT) for action in messages)


def devices_of_stages(
    actions: Sequence[Sequence[SwarmAction]], num_stages: int, device_of: Callable[[int], int]
) -> list[list[int]]:
    """Return the devices on which passes of each stage are computed in any step. device_of: peer -> its device."""
    devices: list[set[int]] = [set() for _ in range(num_stages)]
    for step in actions:
        for action in step:
            if action.kind in (FORWARD_PASS, BACKWARD_PASS):
                devices[action.stage].add(device_of(action.peer))
    return [sorted(of_stage) for of_stage in devices]
