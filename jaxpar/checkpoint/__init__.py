"""Checkpoints of the canonical state, written atomically by orbax, in the background.

    workdir/checkpoints/STEP/state     the canonical state (jaxpar/core/state.py), a pytree of arrays
    workdir/checkpoints/STEP/private   private state that the strategy needs to resume exactly; missing if there is none
    workdir/checkpoints/STEP/info      JSON: format, step, examples, config, data fingerprint, checksums
    workdir/checkpoints/STEP/metrics   JSON: validation_loss; missing if it was not measured at this step

docs/explanation/checkpoints.md specifies the format and explains how to read it without jaxpar.

A single process copies the arrays to the host and writes them while the next steps compute; several processes each
write their part. Orbax renames a temporary directory at the end, so a killed process leaves no partial checkpoint.
Checksums detect later damage. Reading changes no files. Training resumes from the newest intact checkpoint and renames
later, damaged ones to STEP.damaged.
"""

from jaxpar.checkpoint.reader import Checkpoint as Checkpoint
from jaxpar.checkpoint.reader import Damaged as Damaged
from jaxpar.checkpoint.reader import best_step as best_step
from jaxpar.checkpoint.reader import config_of as config_of
from jaxpar.checkpoint.reader import newest_config as newest_config
from jaxpar.checkpoint.reader import of_run as of_run
from jaxpar.checkpoint.reader import read as read
from jaxpar.checkpoint.reader import restore as restore
from jaxpar.checkpoint.reader import restore_params as restore_params
from jaxpar.checkpoint.reader import steps as steps
from jaxpar.checkpoint.reader import unfinished_bytes as unfinished_bytes
from jaxpar.checkpoint.writer import CERTIFIED as CERTIFIED
from jaxpar.checkpoint.writer import Saver as Saver
from jaxpar.checkpoint.writer import certified_steps as certified_steps
from jaxpar.checkpoint.writer import repair_metrics as repair_metrics
from jaxpar.checkpoint.writer import set_aside as set_aside
