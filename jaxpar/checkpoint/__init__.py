"""Checkpoints of the canonical state, written atomically by orbax, in the background.

    workdir/checkpoints/STEP/state     the canonical state (jaxpar/core/state.py), a pytree of arrays
    workdir/checkpoints/STEP/private   private state that the strategy needs to resume exactly; missing if there is none
    workdir/checkpoints/STEP/info      JSON: format, step, examples, config, data fingerprint, checksums
    workdir/checkpoints/STEP/metrics   JSON: validation_loss; missing if it was not measured at this step

docs/reference/checkpoint.md specifies the format and explains how to read it without jaxpar.

A single process copies the arrays to the host and writes them while the next steps compute; several processes each
write their part. Orbax renames a temporary directory at the end, so a killed process leaves no partial checkpoint.
Checksums detect later damage. Reading changes no files. Training resumes from the newest intact checkpoint and renames
later, damaged ones to STEP.damaged.
"""

from jaxpar.checkpoint.reader import (
    Checkpoint,
    Damaged,
    best_step,
    config_of,
    newest_config,
    of_run,
    read,
    restore,
    restore_params,
    steps,
    unfinished_bytes,
)
from jaxpar.checkpoint.writer import CERTIFIED, Saver, certified_steps, repair_metrics, set_aside

__all__ = [
    "CERTIFIED",
    "Checkpoint",
    "Damaged",
    "Saver",
    "best_step",
    "certified_steps",
    "config_of",
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
