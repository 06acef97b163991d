"""The meaning of the outputs of a Hugging Face classifier: `id2label` and `problem_type` of its config.json."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.data import DataInfo
from jaxpar.errors import UserError

PROBLEMS = ("regression", "single_label_classification")
UNNAMED = re.compile(r"LABEL_\d+")  # the names that `transformers` gives to classes without names


def check_labels(settings: Mapping[str, Any], path: Path) -> None:
    """Raise UserError if the labels in a config.json are invalid. path: of the file."""
    problem, names = settings.get("problem_type"), settings.get("id2label")
    if problem is not None and problem not in PROBLEMS:
        why = ", because no task here has several labels per example"
        raise UserError(
            f"config.model.init_from is {str(path.parent)!r} with problem_type {problem!r} in config.json; it must be "
            f"{' or '.join(PROBLEMS)}{why * (problem == 'multi_label_classification')}"
        )
    if names is None:
        return
    ids = {str(index) for index in range(len(names))} if isinstance(names, dict) else None
    if ids is None or names.keys() != ids or not all(isinstance(name, str) for name in names.values()):
        raise UserError(
            f'{path} has id2label {names!r:.60}; it must be the name of each class by number: {{"0": "no"}}'
        )


def output_order(settings: Mapping[str, Any], info: DataInfo) -> Sequence[int] | None:
    """Return the output of the directory's classifier for each output of a model of this data set.

    Class names that are the numbers 0 to n - 1 select outputs by number. Without names, the order is the same.

    Args:
      settings: the contents of a config.json that `check_labels` accepts.
      info: the data set.

    Returns:
      None if the classifier has other classes, or predicts numbers in place of classes or classes in place of numbers.
    """
    problem, ours = settings.get("problem_type"), info.targets or info.class_names
    if problem is not None and (problem == "regression") != bool(info.targets):
        return None
    theirs = [settings["id2label"][str(i)] for i in range(len(settings["id2label"]))] if "id2label" in settings else []
    if len(theirs) != len(ours):
        return range(len(ours))  # the shapes decide
    if set(theirs) == set(ours):
        return [theirs.index(name) for name in ours]
    if set(ours) == {str(index) for index in range(len(ours))}:
        return [int(name) for name in ours]
    return range(len(ours)) if all(map(UNNAMED.fullmatch, theirs)) else None
