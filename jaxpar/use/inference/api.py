"""The trained model of a run, for use from Python: `jaxpar.load("runs/quickstart").predict(texts)`."""

import itertools
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import data
from jaxpar.data import Labels, text
from jaxpar.data.batches import WINDOW
from jaxpar.data.corpus import text_columns
from jaxpar.data.examples import buckets_of
from jaxpar.data.tokens import Encoder
from jaxpar.errors import UserError
from jaxpar.tasks import Prediction
from jaxpar.use.inference import inputs
from jaxpar.use.inference.generate import Completion, Generator, Sampling
from jaxpar.use.inference.load import Trained, load_trained
from jaxpar.use.inference.predictor import Predictor

Text = str | Sequence[str]  # a text; a pair of texts; or a list of words


class InferenceModel:
    """A trained model, on the devices at hand."""

    def __init__(self, trained: Trained):
        """Use a trained model."""
        self.trained = trained  # its parts: step, config, parameters, tokenizer and others

    @cached_property
    def predictor(self) -> Predictor:
        """The compiled programs."""
        return Predictor(self.trained)

    @cached_property
    def generator(self) -> Generator:
        """The generator of texts. Raises UserError if the model is not a causal language model of jaxpar."""
        return Generator(self.trained)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the text columns that the model reads."""
        return text_columns(self.trained.config)

    @cached_property
    def _encoder(self) -> Encoder:
        return inputs.make_encoder(self.trained)

    def predict(self, examples: Sequence[Text] | np.ndarray, *, top_k: int = 1) -> list[Prediction]:
        """Return the prediction for each example, in order, in the form that docs/howto/predict.md describes.

        Args:
          examples: texts; pairs of texts for a model of two text columns; lists of words for token classification;
            uint8 images [N, H, W, C] or float32 vectors [N, D]. Texts longer than the model allows are truncated.
          top_k: number of choices that a prediction lists. For tasks without choices, it must be 1.

        Raises:
          UserError: the examples are of another kind, or there are none.
        """
        self.predictor.check_top_k("top_k", top_k)
        if self.trained.info.kind == "text" or not isinstance(examples, np.ndarray):
            self.check(examples)
        most = WINDOW * self.predictor.batch_size
        if self.trained.info.kind != "text":
            array = inputs.check_array(np.asarray(examples), self.trained.info, "examples is an array")
            windows = inputs.arrays_of(array, most)
        else:
            assert not isinstance(examples, np.ndarray)
            rows = _rows(examples)
            parts = (rows[start : start + most] for start in range(0, len(rows), most))
            windows = ((inputs.Window((), 0), self._encoder(part).split) for part in parts)
        return list(itertools.chain.from_iterable(found for _, found in self.predictor.stream(windows, top_k)))

    def warm_up(self, top_k: int = 1) -> None:
        """Compile the programs of `predict` for texts of all lengths, with one mask token at most."""
        for length in buckets_of(self.trained.config):
            splits = [(None, self._encoder.blank(number, length)) for number in self.predictor.sizes]
            list(self.predictor.stream(splits, top_k))

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_tokens: int = 100,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[Completion]:
        """Return the continuation of each prompt, in order. `generator.stream` yields the pieces as they are computed.

        Args:
          prompts: one or more texts to continue, all at the same time.
          max_tokens: the longest continuation.
          temperature: divisor of the logits; 0: every token is the most likely one.
          top_k: number of most likely tokens to draw from; 0: all.
          top_p: draw from the fewest tokens whose probabilities sum up to at least this.
          seed: seed of the random numbers. The same seed gives the same text.

        Raises:
          UserError: an argument is invalid, or the model is not a causal language model.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"prompts is {prompts!r:.60}; it must be a text or a list of texts")
        return self.generator(texts, max_tokens, Sampling(temperature, top_k, top_p, seed))

    def is_truncated(self, texts: Sequence[Text]) -> list[bool]:
        """Return for each text whether it is longer than the model allows, so that only its first tokens are read."""
        return [bool(one) for one in self._encoder(_rows(texts)).is_truncated_N]

    def check(self, examples: Any, name: str = "examples") -> None:
        """Raise UserError unless the examples, called `name`, are a sequence of texts as the model reads them."""
        trained = self.trained
        if isinstance(examples, np.ndarray):
            raise UserError(f"{name} is a NumPy array; it must be a list of texts, because the model reads texts")
        if trained.info.kind != "text":
            raise UserError(f"{name} is {type(examples).__name__}; it must be a NumPy array of {trained.info.kind}s")
        is_words, is_pair = trained.task.labels is Labels.TAGS, len(self.columns) == 2
        kind = "lists of words" if is_words else "pairs of texts" if is_pair else "texts"
        if not isinstance(examples, list | tuple) or not examples:
            raise UserError(f"{name} is {examples!r:.60}; it must be a non-empty list of {kind}")
        for number, one in enumerate(examples):
            items = [one] if not (is_words or is_pair) else list(one) if isinstance(one, list | tuple) else []
            is_right = len(items) > 0 if is_words else len(items) == len(self.columns)
            if not is_right or not all(isinstance(item, str) for item in items):
                raise UserError(f"{name}[{number}] is {one!r:.60}; they must be {kind}")
            for item in items:
                inputs.check_unicode(item, f"{name}[{number}]")

    def evaluate(self, path: str | Path) -> dict[str, float]:
        """Return the loss and the metrics of the task on a labelled file, as the run computes them for a split.

        Examples that the run was trained on do not measure how good the model is.

        Args:
          path: a table or text with the columns of the run's config; for images, the directory of the files.

        Raises:
          UserError: the file is invalid, or the run has synthetic data.
        """
        if not isinstance(path, str | Path):
            raise UserError(f"path is {path!r:.60}; it must be the path of a file or a directory")
        trained, path = self.trained, Path(path)
        config = trained.config.copy_and_resolve_references()
        source = config.data.source
        if source == "synthetic":
            raise UserError(f"{trained.workdir} has synthetic data; evaluate reads files, so it must be a run on files")
        if trained.info.kind == "image":
            config.data.train = str(path)
            split = data.load(config, trained.task.labels, trained.workdir).test
            assert split is not None
            return self.predictor.metrics(split)
        inputs.check_file(path, "path")
        if source != "text":
            source = inputs.input_format(path, None, trained, "path")
        config.data.update(source=source, test=str(path), text_columns=self.columns)
        assert trained.tokenizer is not None
        with tempfile.TemporaryDirectory() as folder:
            split = text.load_split(
                config, trained.task.labels, trained.info, trained.tokenizer.to_str(), trained.workdir, Path(folder)
            )
            return self.predictor.metrics(split)


def _rows(texts: Sequence[Text]) -> list[tuple[str, ...]]:
    """Return each text as the tuple that the encoder reads."""
    return [(one,) if isinstance(one, str) else tuple(one) for one in texts]


def load(
    workdir: str | Path, step: int | None = None, devices: Sequence[jax.Device] | None = None, *, tensor: int = 1
) -> InferenceModel:
    """Load the trained model of the run in `workdir`: the step of the lowest validation loss, unless `step` is given.

    See `load_trained`.
    """
    return InferenceModel(load_trained(workdir, step, devices, tensor=tensor))


def predict(workdir: str | Path, examples: Sequence[Text] | np.ndarray, *, top_k: int = 1) -> list[Prediction]:
    """Return the prediction of the trained model of a run for each example, as `load(workdir).predict` does.

    Load the model once to predict more than once.
    """
    return load(workdir).predict(examples, top_k=top_k)
