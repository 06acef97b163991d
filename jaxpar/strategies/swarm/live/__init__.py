"""Live swarms: peers are processes on Ray, on this machine or others, which join, fail and leave while training runs.

    cluster.py    starts or joins a Ray cluster, starts peers, finds those of an earlier trainer: the only use of Ray
    peer.py       a peer: the passes, gradients and optimizer steps of the stage that it serves; what the trainer and
                  its peers send each other, and checks of it before it is used
    calls.py      calls to peers: answers, failures, and silence by each peer's measured times
    members.py    the peers of a run: the transport of the engine, which decides (engine.py)
    step.py       one global batch: sends its passes, checks what peers send, and averages the gradients
    trainer.py    the training step, and the copy of the state outside the swarm
    events.py     what happened, for whoever listens; view.py draws it in a terminal

Activations and gradients go from peer to peer through the object stores of their machines. The trainer handles
references to them. It holds the canonical state, from which evaluation and checkpoints read, and from which a peer
loads the stage that it is to serve.
"""
