"""Shares of the training data: worker w of W runs trains on the examples w, w + W, .. (config.outer).

Dims: N examples of the share, B examples of a batch.
"""

from dataclasses import dataclass

import numpy as np
from ml_collections import ConfigDict

from jaxpar.config import check_rules
from jaxpar.data.examples import Arrays, Dataset, Split


@dataclass(frozen=True)
class Share:
    """Every `num_workers`-th example of a split, from example `worker` on."""

    split: Split
    worker: int
    num_workers: int

    @property
    def lengths_N(self) -> np.ndarray | None:
        """See Split."""
        lengths = self.split.lengths_N
        return None if lengths is None else lengths[self.worker :: self.num_workers]

    def __len__(self) -> int:
        return len(range(self.worker, len(self.split), self.num_workers))

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        return self.split.gather(examples_B * self.num_workers + self.worker, shard, random, training=training)


def with_share(dataset: Dataset, config: ConfigDict) -> Dataset:
    """Return the data set with the training examples of the worker of a config.

    Raises UserError if there are fewer examples than workers.
    """
    o = config.outer
    if o.num_workers < 2:
        return dataset
    most = f"at most {len(dataset.train)}, the number of training examples"
    check_rules(config, [("outer.num_workers", o.num_workers <= len(dataset.train), most)])
    return dataset._replace(train=Share(dataset.train, o.worker, o.num_workers))
