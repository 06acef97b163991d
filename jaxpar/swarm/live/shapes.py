"""Expected shapes of what the peers of a live swarm send."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple


class StepShapes(NamedTuple):
    """Expected shapes and dtypes in a step with microbatches of one shape.

    Attributes:
      key: identifies the shapes of the microbatches.
      messages: of the arrays of a message, by (STAGE_INPUT or OUTPUT_GRADIENT, stage).
      sums: of the metric sums of a microbatch.
      sizes: by stage, the number of parameters, with copies of tied arrays.
    """

    key: Hashable
    messages: Mapping[tuple[int, int], Sequence[Any]]
    sums: Sequence[Any]
    sizes: Sequence[int]
