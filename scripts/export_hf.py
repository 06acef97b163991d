"""Exports the trained model of a run as a directory that Hugging Face `transformers` can load.

    scripts/train --config=configs/quickstart.py --workdir=runs/cls --config.model.pooling=cls
    scripts/python scripts/export_hf.py runs/cls exported

    >>> from transformers import AutoModelForSequenceClassification, AutoTokenizer
    >>> model = AutoModelForSequenceClassification.from_pretrained("exported")
    >>> tokenizer = AutoTokenizer.from_pretrained("exported")

The weights are from the newest checkpoint. `transformers` has no BERT classifier with mean pooling, so
config.model.pooling must be cls.
"""

import sys
from pathlib import Path

from absl import logging

from jaxpar import checkpoint, data
from jaxpar.command_line import Parser
from jaxpar.errors import exit_code
from jaxpar.models import hf


def export(workdir: Path, directory: Path) -> None:
    """Write the model of the run in `workdir` to `directory`. Raises UserError if that is not empty or not possible."""
    config, params = checkpoint.restore_params(workdir)
    info = data.read_info(workdir)
    hf.save_directory(params, config, info, workdir / "tokenizer.json", directory)
    print(f"{directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    example = "scripts/export_hf.py runs/cls exported"
    parser.require("workdir", example, rule="the workdir of a run", type=Path, help="workdir of a run")
    parser.require("directory", example, rule="a new or empty directory", type=Path, help="new or empty directory")
    arguments = parser.parse()
    logging.set_verbosity(logging.ERROR)  # silences orbax
    export(arguments.workdir, arguments.directory)


if __name__ == "__main__":
    sys.exit(exit_code(main))
