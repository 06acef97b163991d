"""Live swarms: peers are processes on Ray, on this machine or others, which join, fail and leave while training runs.

Activations and gradients go from peer to peer (peer.py) through the object stores of their machines. The trainer
(trainer.py) handles references to them. It holds the canonical state, from which evaluation and checkpoints read, and
from which a peer loads the stage that it is to serve. Who serves and computes what is in members.py and step.py.
"""
