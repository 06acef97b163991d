"""Predicts with the trained model of a run: labels of texts, numbers, tags of words, or tokens.

    jaxpar predict --workdir=runs/quickstart --input=new.csv --output=predictions.csv
    cut -f2 new.tsv | jaxpar predict --workdir=runs/quickstart --input=- > predictions.jsonl
    jaxpar predict --workdir=runs/quickstart

The first command reads the text columns of the run's config, and writes all columns of the input and the predictions.
The second one reads a line for each text. The last one asks for texts in the terminal. docs/predict.md explains the
formats. The model is that of the best checkpoint.
"""

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from jaxpar import data
from jaxpar.command_line import Parser, choice, integer, output_path
from jaxpar.data.corpus import text_columns
from jaxpar.data.rows import INPUT_READERS
from jaxpar.errors import UserError, format_count, printable
from jaxpar.use.inference import inputs, outputs
from jaxpar.use.inference.api import InferenceModel
from jaxpar.use.inference.inputs import STDIN
from jaxpar.use.inference.load import Trained, load_trained, prepare
from jaxpar.use.inference.predictor import Predictor


def _log(line: str) -> None:
    """Print a line to stderr, because stdout can contain the predictions."""
    print(printable(line), file=sys.stderr, flush=True)


def _predict(arguments: Namespace) -> None:
    """Predict for the examples of the input. Raises UserError for a mistake, and leaves no output then."""
    path = STDIN if arguments.input in (None, "-") else Path(arguments.input)
    if path != STDIN:
        inputs.check_file(path, "--input")
    elif sys.stdin is None:
        raise UserError("the standard input is closed; it must be open, or --input must be a file")
    if arguments.output:
        outputs.check_table_file(arguments.output)
    prepare(arguments.workdir)
    trained = load_trained(arguments.workdir, arguments.step, log=_log)
    predictor = Predictor(trained, arguments.batch_size)
    predictor.check_top_k("--top_k", arguments.top_k)
    _log(f"model     step {trained.step} of {trained.workdir}, on {format_count(trained.mesh.size, 'device')}")
    if arguments.input is None and trained.info.kind == "text" and sys.stdin.isatty():
        _ask(trained, arguments.top_k)
    else:
        predict_file(predictor, path, arguments.output, arguments.top_k, arguments.format)


def predict_file(predictor: Predictor, path: Path, output: Path | None, top_k: int, given: str | None) -> None:
    """Write the predictions for a file or a pipe. given: its format, as in `input_format`."""
    trained = predictor.trained
    kind = inputs.input_format(path, given, trained)
    windows = inputs.read_windows(trained, path, kind, predictor.batch_size)
    suffix = output.suffix.removeprefix(".") if output else "csv" if kind in ("csv", "tsv") else "jsonl"
    number, num_truncated, begin = 0, 0, time.perf_counter()
    with outputs.open_output(output, suffix, inputs.schema_of(path, kind)) as write:
        for window, predictions in predictor.stream(windows, top_k):
            write(window.records, predictions)
            number += len(predictions)
            num_truncated += window.num_truncated
    if num_truncated:
        longest = trained.info.input_shape[0]
        _log(f"truncated {num_truncated:,} of {number:,} texts, which are longer than {longest} tokens")
    seconds = time.perf_counter() - begin
    where = f", in {output}" if output else ""
    _log(f"predicted {format_count(number, 'example')}{where}, at {number / seconds:,.0f} examples/s")


def _ask(trained: Trained, top_k: int) -> None:
    """Read texts in the terminal, and print the prediction for each one, until the end of the input."""
    model, columns = InferenceModel(trained), text_columns(trained.config)
    is_words = trained.task.labels is data.Labels.TAGS
    _log("Ctrl-D ends")
    for texts in prompts(columns):
        example: Any = texts[0].split() if is_words else texts[0] if len(texts) == 1 else texts
        try:
            [prediction] = model.predict([example], top_k=top_k)
        except UserError as error:
            _log(f"jaxpar: {error}")
        else:
            print(outputs.to_json(prediction), flush=True)


def prompts(columns: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the texts that the user enters, one for each column, until the end of the input."""
    with contextlib.suppress(EOFError):
        while True:
            yield [input(f"{name}> ") for name in columns]


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = Parser(__doc__, "jaxpar predict")
    example = "--workdir=runs/quickstart"
    parser.require("--workdir", example, rule="the workdir of a run", type=Path, help="workdir of a run")
    parser.add_argument("--input", help="file, or - for a pipe (default: the pipe, or texts that you enter)")
    parser.add_argument("--output", type=output_path, help="new .csv, .jsonl or .parquet file (default: stdout)")
    formats = [*INPUT_READERS, "npy"]
    parser.add_argument("--format", type=choice(formats), help=f"of the input: {', '.join(formats)} (default: by name)")
    parser.add_argument("--top_k", type=integer(1), default=1, help="number of choices to list (default: 1)")
    parser.add_argument("--step", type=integer(0), help="step of the checkpoint (default: the best one)")
    parser.add_argument("--batch_size", type=integer(1), help="examples of a batch (default: that of evaluations)")
    arguments = parser.parse(argv)
    logging.set_verbosity(logging.FATAL)  # orbax also logs the errors that it raises
    try:
        _predict(arguments)
    except KeyboardInterrupt:
        _log("jaxpar: interrupted; no file was written" if arguments.output else "jaxpar: interrupted")
        raise
