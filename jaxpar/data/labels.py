"""The kinds of labels that a data set can be asked for: where they come from, and their dtype and shape.

Dims: B examples, T positions, K targets.
"""

from enum import Enum


class Labels(Enum):
    """A kind of labels. Its value is the config.task that asks for it: part of messages and of fingerprints."""

    CLASSES = "classification"  # int32 [B]: a class an example, of the label column
    MASKED = "masked_lm"  # int32 [B, T]: the tokens themselves, some of which are hidden
    TARGETS = "regression"  # float32 [B, K]: numbers of an example, of the target columns
    TAGS = "token_classification"  # int32 [B, T]: a tag at the first token of each word, of the label column
    NEXT = "causal_lm"  # int32 [B, T]: the tokens that follow

    @property
    def in_columns(self) -> bool:
        """Whether they are in columns of a table; else they are made of the text."""
        return self not in (Labels.MASKED, Labels.NEXT)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Kinds of data that can have them, as in `DataInfo.kind`."""
        return {Labels.CLASSES: ("text", "image", "vector"), Labels.TARGETS: ("text", "vector")}.get(self, ("text",))
