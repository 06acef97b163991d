"""Predicts with the trained model of a run: labels of texts, numbers, tags of words, or tokens.

    jaxpar predict --workdir=runs/quickstart --input=new.csv --output=predictions.csv
    cut -f2 new.tsv | jaxpar predict --workdir=runs/quickstart --input=- > predictions.jsonl
    jaxpar predict --workdir=runs/quickstart

The first command reads the text columns of the run's config, and writes all columns of the input and the predictions.
The second one reads a line for each text. The last one asks for texts in the terminal. docs/howto/predict.md explains
the formats. The model is that of the best checkpoint.
"""

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar import data
from jaxpar.command_line import Parser, choice, integer, log_line, output_path
from jaxpar.data.corpus import text_columns
from jaxpar.data.rows import INPUT_READERS
from jaxpar.errors import UserError, format_count
from jaxpar.use.inference import inputs, outputs
from jaxpar.use.inference.api import InferenceModel
from jaxpar.use.inference.inputs import STDIN
from jaxpar.use.inference.load import Trained, load_trained, prepare
from jaxpar.use.inference.predictor import Predictor


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
    trained = load_trained(arguments.workdir, arguments.step, tensor=arguments.tensor, log=log_line)
    predictor = Predictor(trained, arguments.batch_size)
    predictor.check_top_k("--top_k", arguments.top_k)
    groups, devices = f", each layer on {arguments.tensor}" * (arguments.tensor > 1), trained.mesh.size
    log_line(f"model     step {trained.step} of {trained.workdir}, on {format_count(devices, 'device')}{groups}")
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
        log_line(f"truncated {num_truncated:,} of {number:,} texts, which are longer than {longest} tokens")
    where, rate = f", in {output}" if output else "", number / (time.perf_counter() - begin)
    log_line(f"predicted {format_count(number, 'example')}{where}, at {rate:,.0f} examples/s")


def _ask(trained: Trained, top_k: int) -> None:
    """Ask for a text for each column in the terminal, and print the prediction, until the end of the input."""
    model, columns = InferenceModel(trained), text_columns(trained.config)
    log_line("Ctrl-D ends")
    with contextlib.suppress(EOFError):
        while True:
            texts = [input(f"{name}> ") for name in columns]
            example: Any = texts[0] if len(texts) == 1 else texts
            if trained.task.labels is data.Labels.TAGS:
                example = texts[0].split()
            try:
                [prediction] = model.predict([example], top_k=top_k)
                print(outputs.to_json(prediction), flush=True)
            except UserError as error:
                log_line(f"jaxpar: {error}")


def main(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, "jaxpar predict")
    add, formats = parser.add_argument, [*INPUT_READERS, "npy"]
    example, rule = "--workdir=runs/quickstart", "the workdir of a run"
    parser.require("--workdir", example, rule=rule, type=Path, help="workdir of a run")
    add("--input", help="file, or - for a pipe (default: the pipe, or texts that you enter)")
    add("--output", type=output_path, help="new .csv, .jsonl or .parquet file (default: stdout)")
    add("--format", type=choice(formats), help=f"of the input: {', '.join(formats)} (default: by name)")
    add("--top_k", type=integer(1), default=1, help="number of choices to list (default: 1)")
    add("--tensor", type=integer(1), default=1, help="devices that compute each layer together (default: 1)")
    add("--step", type=integer(0), help="step of the checkpoint (default: the best one)")
    add("--batch_size", type=integer(1), help="examples of a batch (default: that of evaluations)")
    arguments = parser.parse(argv)
    try:
        _predict(arguments)
    except KeyboardInterrupt:
        log_line("jaxpar: interrupted; no file was written" if arguments.output else "jaxpar: interrupted")
        raise
