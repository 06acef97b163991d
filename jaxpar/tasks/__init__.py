"""The tasks that a model can be trained for. Only `find_task` reads config.task; all other code gets the object."""

from collections.abc import Callable

from ml_collections import ConfigDict

from jaxpar.errors import check_choice
from jaxpar.tasks import classification, language_models, regression, token_classification
from jaxpar.tasks.task import Head, Names, Prediction, Score, Sums, Task, add_up, mean_loss

__all__ = ["TASKS", "Head", "Names", "Prediction", "Score", "Sums", "Task", "add_up", "find_task", "mean_loss"]

TASKS: dict[str, Callable[[ConfigDict], Task]] = {
    "classification": lambda _config: classification.TASK,
    "regression": regression.make_regression,
    "token_classification": lambda _config: token_classification.TASK,
    "masked_lm": lambda _config: language_models.MASKED_LM,
    "causal_lm": lambda _config: language_models.CAUSAL_LM,
}


def find_task(config: ConfigDict) -> Task:
    """Return the task of a config. Raises UserError if config.task is unknown."""
    check_choice("task", config.task, TASKS)
    return TASKS[config.task](config)
