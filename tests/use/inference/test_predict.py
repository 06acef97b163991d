"""Tests the command `jaxpar predict`: formats, pipes, the terminal, and mistakes."""

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jaxpar
from jaxpar import checkpoint
from jaxpar.commands import predict
from jaxpar.core import mesh
from jaxpar.data.rows import TextRow
from jaxpar.errors import UserError
from jaxpar.use.inference import inputs, outputs
from jaxpar.use.inference.load import load_trained
from jaxpar.use.inference.predictor import Predictor
from tests.runs import run_script
from tests.use.inference.conftest import TrainedRun, records

EXAMPLES = [{"n": place, "text": one["text"], "other": one["other"]} for place, one in enumerate(records(21, seed=3))]
TEXTS = [str(one["text"]) for one in EXAMPLES]


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the JAX settings of the tests."""
    monkeypatch.setattr(mesh, "prepare_jax", lambda *_: None)


@pytest.fixture(scope="module")
def expected(classifier: Path) -> list[dict[str, Any]]:
    """The predictions for EXAMPLES from Python, which test_loaded.py checks."""
    found: list[Any] = jaxpar.load(classifier).predict(TEXTS)
    return found


def write(path: Path) -> Path:
    """Write EXAMPLES in the format that the extension names."""
    if path.suffix == ".parquet":
        pq.write_table(
            pa.Table.from_pylist(
                EXAMPLES, pa.schema([("n", pa.int16()), ("text", pa.large_string()), ("other", pa.string())])
            ),
            path,
        )
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in EXAMPLES))
    elif path.suffix == ".txt":
        path.write_text("".join(f"{text}\n\n" for text in TEXTS))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, EXAMPLES[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(EXAMPLES)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Read a file of predictions."""
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return [{**row, "probability": float(row["probability"])} for row in csv.DictReader(file)]


FORMATS = [
    ("csv", "csv"),
    ("tsv", "jsonl"),
    ("jsonl", "csv"),
    ("jsonl", "parquet"),
    ("parquet", "parquet"),
    ("parquet", "jsonl"),
    ("txt", "csv"),
]


@pytest.mark.parametrize(("source", "target"), FORMATS)
def test_files(
    source: str,
    target: str,
    classifier: Path,
    expected: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The output has all columns of the input and the predictions, in order."""
    given, output = write(tmp_path / f"in.{source}"), tmp_path / f"out.{target}"
    assert run_script(monkeypatch, predict, f"--workdir={classifier}", f"--input={given}", f"--output={output}") == 0
    found = read(output)
    typed: dict[str, dict[str, type]] = {
        "jsonl": {"csv": str, "jsonl": int, "parquet": str},
        "parquet": dict.fromkeys(("jsonl", "parquet"), int),
    }
    number = typed.get(source, {}).get(target, str)
    for one, example, prediction in zip(found, EXAMPLES, expected, strict=True):
        kept = {"text": example["text"]} if source == "txt" else {**example, "n": number(example["n"])}
        assert one == {**kept, "class": prediction["class"], "probability": pytest.approx(prediction["probability"])}
    if (source, target) == ("parquet", "parquet"):
        assert pq.read_schema(output).types[:3] == [pa.int16(), pa.large_string(), pa.string()]
    out, err = capsys.readouterr()
    assert out == ""
    assert f"predicted 21 examples, in {output}" in err
    assert {path.name for path in tmp_path.iterdir()} == {given.name, output.name}


@pytest.fixture
def stdin() -> Iterator[Any]:
    """Return the function that makes bytes the standard input, as a pipe."""
    saved = os.dup(0)

    def set_input(content: bytes) -> None:
        reader, writer = os.pipe()
        os.dup2(reader, 0)
        os.close(reader)

        def fill() -> None:
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(content)

        threading.Thread(target=fill).start()

    yield set_input
    os.dup2(saved, 0)
    os.close(saved)


@pytest.mark.parametrize("kind", ["lines", "jsonl", "csv"])
def test_pipes(
    kind: str,
    stdin: Any,
    classifier: Path,
    expected: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without --output, stdout has the predictions alone."""
    stdin(write(tmp_path / f"in.{'txt' if kind == 'lines' else kind}").read_bytes())
    given = [] if kind == "lines" else ["--input=-", f"--format={kind}"]
    assert run_script(monkeypatch, predict, f"--workdir={classifier}", *given) == 0
    out = capsys.readouterr().out
    (tmp_path / "out.csv").write_text(out)
    (tmp_path / "out.jsonl").write_text(out)
    found = read(tmp_path / ("out.csv" if kind == "csv" else "out.jsonl"))
    assert [(one["text"], one["class"]) for one in found] == [
        (text, one["class"]) for text, one in zip(TEXTS, expected, strict=True)
    ]


def test_the_terminal(
    classifier: Path,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entered = iter(TEXTS[:2])
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda _self: True})())

    def enter(prompt: str) -> str:
        assert prompt == "text> "
        if text := next(entered, None):
            return text
        raise EOFError

    monkeypatch.setattr("builtins.input", enter)
    assert run_script(monkeypatch, predict, f"--workdir={classifier}") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["class"] for one in lines] == [one["class"] for one in expected[:2]]


def test_columns_with_the_names_of_predictions(
    trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that a regression was tested on has a column of each target."""
    workdir, output = trained_run("regression"), tmp_path / "out.csv"
    given = workdir.parent / "test.csv"
    assert run_script(monkeypatch, predict, f"--workdir={workdir}", f"--input={given}", f"--output={output}") == 0
    with given.open(newline="") as before, output.open(newline="") as after:
        for old, new in zip(csv.DictReader(before), csv.DictReader(after), strict=True):
            assert {name: new[name] for name in old} == old
            assert new.keys() - old.keys() == {"predicted_stars", "predicted_price"}


@pytest.mark.parametrize("name", ["pairs", "token_classification", "masked_lm"])
def test_nested_predictions_and_several_texts(
    name: str, trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lines, two texts are separated by a tab, and words by spaces. In csv, lists are JSON."""
    examples: list[Any] = [["red", "cat"], ["blue", "dog"]] if name != "masked_lm" else ["red [MASK]", "cat"]
    lines = (
        ["\t".join(one) if name == "pairs" else " ".join(one) for one in examples] if name != "masked_lm" else examples
    )
    (tmp_path / "in.txt").write_text("\n".join(lines))
    command = [f"--workdir={trained_run(name)}", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.csv"]
    assert run_script(monkeypatch, predict, *command) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    expected: list[Any] = jaxpar.load(trained_run(name)).predict(examples)
    for one, prediction in zip(found, expected, strict=True):
        if name == "pairs":
            assert (one["text"], one["other"], one["class"]) in [(*texts, prediction["class"]) for texts in examples]
        elif name == "token_classification":
            assert json.loads(one["tags"]) == prediction["tags"]
        else:
            assert one["predicted_text"] == prediction["text"]
            assert [token["token"] for token in json.loads(one["tokens"])] == [
                token["token"] for token in prediction["tokens"]
            ]


def test_vectors_and_images(trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 32, 32, 3), np.uint8)
    np.save(tmp_path / "in.npy", images)
    workdir, output = trained_run("image"), tmp_path / "out.csv"
    command = [f"--workdir={workdir}", f"--input={tmp_path}/in.npy", f"--output={output}"]
    assert run_script(monkeypatch, predict, *command) == 0
    classes = [(one["index"], one["class"]) for one in read(output)]
    expected: list[Any] = jaxpar.load(workdir).predict(images)
    assert classes == [(str(place), one["class"]) for place, one in enumerate(expected)]


def test_long_texts_are_counted(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("red cat\n" + "red cat " * 20 + "\n" + "dog " * 14 + "\n" + "dog " * 15)
    assert run_script(monkeypatch, predict, f"--workdir={classifier}", f"--input={tmp_path}/in.txt") == 0
    assert "truncated 2 of 4 texts, which are longer than 16 tokens\n" in capsys.readouterr().err


def test_a_damaged_best_checkpoint_is_one_line(classifier: Path, tmp_path: Path) -> None:
    """In a process of its own, because threads that still read damaged files print their errors late."""
    workdir = shutil.copytree(classifier, tmp_path / "run")
    best, used = load_trained(workdir).step, checkpoint.steps(workdir / "checkpoints")[-1]
    if best == used:
        used = checkpoint.steps(workdir / "checkpoints")[-2]
    state = workdir / "checkpoints" / str(best) / "state"
    for file in state.glob("ocdbt.process_0/d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    command = [sys.executable, "-m", "jaxpar", "predict", f"--workdir={workdir}", "--input=-"]
    environment = {**os.environ, "PYTHONPATH": str(Path(predict.__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, input="red cat\n", env=environment, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout)["text"] == "red cat"
    damaged, model, predicted = done.stderr.splitlines()
    assert damaged.startswith(f"the best checkpoint, {workdir}/checkpoints/{best}, is damaged: ")
    assert damaged.endswith(f" cannot be read; using that of step {used}")
    assert model.startswith(f"model     step {used} of ")
    assert predicted.startswith("predicted 1 example, ")


@pytest.mark.parametrize("suffix", outputs.TABLE_FORMATS)
def test_nothing_is_left_after_an_error_or_ctrl_c(
    suffix: str, classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is in the sixth window of 8 examples, when the first one has been written."""
    monkeypatch.setattr(inputs, "WINDOW", 1)
    given = write(tmp_path / "in.jsonl")
    valid = given.read_text() * 2
    given.write_text(valid + "{\n")
    command = [f"--workdir={classifier}", f"--input={given}", f"--output={tmp_path}/out.{suffix}", "--batch_size=8"]
    _, error = script_error_of(monkeypatch, capsys, *command)
    assert error[-1].startswith(f"jaxpar: {given}:43: invalid JSON")
    given.write_text(valid)
    stream = Predictor.stream

    def interrupted(self: Predictor, *arguments: Any) -> Iterator[Any]:
        for number, item in enumerate(stream(self, *arguments)):
            if number:
                raise KeyboardInterrupt  # of Ctrl-C
            yield item

    monkeypatch.setattr(Predictor, "stream", interrupted)
    assert run_script(monkeypatch, predict, *command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "jaxpar: interrupted; no file was written"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def script_error_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[str, list[str]]:
    """Run the script, which must be refused. Return stdout, and the lines of stderr."""
    assert run_script(monkeypatch, predict, *arguments) == 2
    out, err = capsys.readouterr()
    return out, err.splitlines()


MISTAKES: dict[str, tuple[str, Sequence[str], str]] = {
    "no workdir": ("classification", ["--workdir={tmp}"], "{tmp} contains no run: {tmp}/config.json does not exist"),
    "no file": (
        "classification",
        ["--input={tmp}/a.csv"],
        "--input is '{tmp}/a.csv', which does not exist; it must be a file",
    ),
    "a folder": ("classification", ["--input={tmp}"], "--input is '{tmp}', which is a directory; it must be a file"),
    "empty": (
        "classification",
        ["--input={tmp}/empty.csv"],
        "--input is '{tmp}/empty.csv', which is empty; it must contain at least one example",
    ),
    "a header": ("classification", ["--input={tmp}/header.csv"], "{tmp}/header.csv contains no examples"),
    "a column": (
        "classification",
        ["--input={tmp}/other.csv"],
        "{tmp}/other.csv:1 has no column 'text'; its columns are 'texts', 'n'; rename one to 'text', "
        "the name in the run's training data",
    ),
    "columns of one name": (
        "classification",
        ["--input={tmp}/twice.csv"],
        "{tmp}/twice.csv:1 has more than one column 'n'; it must have one",
    ),
    "an image": (
        "classification",
        ["--input={tmp}/image.png"],
        "--input is '{tmp}/image.png'; its format must be csv, tsv, jsonl, parquet, lines (txt) for {run}, whose data "
        "is text",
    ),
    "a text for images": (
        "image",
        ["--input={tmp}/header.csv"],
        "--input is '{tmp}/header.csv'; its format must be npy for {run}, whose data is image",
    ),
    "not an array": (
        "image",
        ["--input={tmp}/image.npy"],
        "--input is '{tmp}/image.npy'; it must be an array in NumPy's format npy: ",
    ),
    "words in csv": (
        "token_classification",
        ["--input={tmp}/header.csv"],
        "--input is '{tmp}/header.csv' with the format csv; it must be jsonl, parquet or lines, because the task "
        "token_classification reads lists of words",
    ),
    "parquet from a pipe": (
        "classification",
        ["--input=-", "--format=parquet"],
        "--input is '-' with the format parquet; it must be a file, because parquet is not a stream",
    ),
    "not parquet": ("classification", ["--input={tmp}/a.parquet"], "{tmp}/a.parquet is not a readable parquet file: "),
    "a text alone": (
        "pairs",
        ["--input={tmp}/lines.txt"],
        "{tmp}/lines.txt:1 has 1 text; it must have 2, separated by a tab",
    ),
    "output exists": (
        "classification",
        ["--output={tmp}/other.csv", "--input={tmp}/other.csv"],
        "--output is '{tmp}/other.csv', which exists; it must be a new file",
    ),
    "output of no format": (
        "classification",
        ["--output={tmp}/a.txt"],
        "--output is '{tmp}/a.txt'; its extension must be one of .csv, .jsonl, .parquet",
    ),
    "output in no folder": (
        "classification",
        ["--output={tmp}/b/a.csv"],
        "--output is '{tmp}/b/a.csv'; it must be in an existing directory, and '{tmp}/b' is not one",
    ),
    "top_k": (
        "regression",
        ["--input={tmp}/lines.txt", "--top_k=2"],
        "--top_k is 2; it must be 1, because the task is 'regression'",
    ),
    "a key of a later record": (
        "classification",
        ["--input={tmp}/keys.jsonl", "--output={tmp}/out.csv"],
        "a record has the key 'b', which the first one lacks; use --output=FILE.jsonl, or add it to the first record",
    ),
    "a key with the name of a prediction": (
        "classification",
        ["--input={tmp}/class.jsonl", "--output={tmp}/out.jsonl"],
        "a record has the key 'class', which the first one lacks, and which is the name of a prediction; rename it, or "
        "add it to the first record",
    ),
    "no run with a tokenizer": (
        "image",
        ["--format=lines"],
        "--format is 'lines'; its format must be npy for {run}, whose data is image",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_in_one_line(
    name: str,
    trained_run: TrainedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contents = {
        "empty.csv": "",
        "header.csv": "text\n",
        "other.csv": "texts,n\nred,1\n",
        "twice.csv": "text,n,n\nred,1,2\n",
        "image.png": "\x89PNG",
        "image.npy": "\x93NUM",
        "a.parquet": "PAR1",
        "lines.txt": "red\n",
        "keys.jsonl": '{"text": "red"}\n{"text": "red", "b": 1}\n',
        "class.jsonl": '{"text": "red"}\n{"text": "red", "class": 1}\n',
    }
    for file, content in contents.items():
        (tmp_path / file).write_text(content)
    run, arguments, message = MISTAKES[name]
    workdir = trained_run(run)
    capsys.readouterr()  # it may have been trained now
    given = [one.format(tmp=tmp_path) for one in (f"--workdir={workdir}", *arguments)]
    out, lines = script_error_of(monkeypatch, capsys, *given)
    assert out == ""
    assert lines[-1].startswith(f"jaxpar: {message.format(tmp=tmp_path, run=workdir)}")
    assert len([line for line in lines if not line.startswith("model ")]) == 1
    assert {path.name for path in tmp_path.iterdir()} == contents.keys()


def test_a_closed_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", None)
    for arguments in ([], ["--input=-"]):
        out, lines = script_error_of(monkeypatch, capsys, f"--workdir={tmp_path}", *arguments)
        assert (out, lines) == (
            "",
            ["jaxpar: the standard input is closed; it must be open, or --input must be a file"],
        )


def test_a_run_without_a_tokenizer(trained_run: TrainedRun) -> None:
    trained = jaxpar.load(trained_run("classification")).trained
    with pytest.raises(UserError, match="without a tokenizer; it must be a run on texts"):
        inputs.make_encoder(trained.__class__(**{**trained.__dict__, "tokenizer": None}))


def test_an_output_that_cannot_be_written(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.csv.tmp").mkdir()  # in the place of the temporary file
    (tmp_path / "in.txt").write_text("red")
    command = [f"--workdir={classifier}", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.csv"]
    _, lines = script_error_of(monkeypatch, capsys, *command)
    assert lines[-1] == f"jaxpar: --output is '{tmp_path}/out.csv'; it must be a writable file: Is a directory"


def test_the_first_windows_are_small() -> None:
    """The devices need not wait until 64 batches are read."""
    rows = [TextRow((), "", Path("a"), 1)] * 3 * 252
    assert [len(chunk) // 3 for chunk in inputs.chunks(rows, 3)] == [4, 8, 16, 32, 64, 64, 64]


def test_chunks_are_small_in_rows_and_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WINDOW_CHARACTERS", 10)
    monkeypatch.setattr(inputs, "WINDOW", 4)
    rows = [TextRow((text,), "", Path("a"), 1) for text in ("aaaa", "bbbb", "cccc", "dddd", "e", "f", "g", "h")]
    found = [[row.texts[0] for row in chunk] for chunk in inputs.chunks(rows, 1)]
    assert found == [["aaaa", "bbbb", "cccc"], ["dddd", "e", "f", "g"], ["h"]]


def test_reading_ahead_is_bounded_and_raises() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number
        raise ZeroDivisionError

    found = inputs.in_background(items(), ahead=3)
    assert next(found) == 0
    threading.Event().wait(0.05)
    assert len(made) <= 5
    rest: list[int] = []
    with pytest.raises(ZeroDivisionError):
        rest.extend(found)
    assert len(made) == 100
