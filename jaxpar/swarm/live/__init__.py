"""Live swarms: peers are processes on Ray, on this machine or others, which join, fail and leave while training runs.

    cluster.py    starts or joins a Ray cluster, starts peers, finds those of an earlier trainer: the only use of Ray
    peer.py       a peer: the passes, gradients and optimizer steps of the stage that it serves
    received.py   checks what a peer receives from another before it is used
    calls.py      calls to peers: answers, failures, and silence by each peer's measured times (patience.py)
    members.py    the peers of a run, with the decisions of routing.py, membership.py and rebalancing.py
    step.py       one global batch: routes its passes until each gradient is counted once, then averages them
    trainer.py    the training step, and the copy of the state outside the swarm
    events.py     what happened, for whoever listens

Activations and gradients go from peer to peer through the object stores of their machines. The trainer handles
references to them. It holds the canonical state, from which evaluation and checkpoints read, and from which a peer
loads the stage that it is to serve.
"""
