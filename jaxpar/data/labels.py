"""The kinds of labels that a data set can provide: where they come from, and their dtype and shape.

Dims: B examples, T positions, K targets.
"""

from enum import Enum


class Labels(Enum):
    """A kind of labels, shared by one or more tasks. The value, the first task's name, is used in fingerprints."""

    CLASSES = "classification"  # int32 [B]: the class of each example, from the label column
    MASKED = "masked_lm"  # int32 [B, T]: the input tokens before masking
    TARGETS = "regression"  # float32 [B, K]: the numbers of each example, from the target columns
    TAGS = "token_classification"  # int32 [B, T]: the tag of each word at its first token, from the label column
    NEXT = "causal_lm"  # int32 [B, T]: the next token at each position

    @property
    def in_columns(self) -> bool:
        """Whether the labels are columns of a table; otherwise they are derived from the text."""
        return self not in (Labels.MASKED, Labels.NEXT)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The kinds of data (see `DataInfo.kind`) that can have these labels."""
        return {Labels.CLASSES: ("text", "image", "vector"), Labels.TARGETS: ("text", "vector")}.get(self, ("text",))
