"""Checkpoints of the canonical state, by orbax: written in the background, whole or not at all.

    workdir/checkpoints/STEP/state     the canonical state (jaxpar/state.py), a pytree of arrays
    workdir/checkpoints/STEP/private   what else its strategy needs to go on exactly; where it needs nothing, not there
    workdir/checkpoints/STEP/info      JSON: format, step, examples, config, data fingerprint, checksums
    workdir/checkpoints/STEP/metrics   JSON: validation_loss, where it was measured at this step

docs/checkpoints.md specifies all of it, and says how to read it without jaxpar.

A single process copies the arrays to the host and writes them from there while the next steps compute; of several, each
copies and writes its part. Orbax writes into a temporary folder and renames it last, so a killed process leaves no half
checkpoint. Checksums of the arrays find what a disk or a copy did to one later. Reading changes
nothing; training goes on from the newest whole checkpoint and sets later ones aside as STEP.damaged.
"""

from jaxpar.checkpoint.reader import (
    Checkpoint,
    Damaged,
    newest_config,
    of_run,
    read,
    restore,
    restore_params,
    steps,
    unfinished_bytes,
)
from jaxpar.checkpoint.repair import repair_metrics, set_aside
from jaxpar.checkpoint.writer import Saver

__all__ = [
    "Checkpoint",
    "Damaged",
    "Saver",
    "newest_config",
    "of_run",
    "read",
    "repair_metrics",
    "restore",
    "restore_params",
    "set_aside",
    "steps",
    "unfinished_bytes",
]
