"""The data pipeline, from files to deterministic batches of NumPy arrays. This package does not use JAX.

`load` reads the data source, creates or opens the cached token arrays and returns a `Dataset`. `Batches` returns the
global batch at step t, or a shard of it, as a function of (seed, t) alone.

A batch is a dict of arrays. Dims: B examples (always batch_size; padding examples, which have weight 0, fill up a
batch), T positions, H W C image height, width and channels, D features, K targets.

- inputs: int32 [B,T] tokens, uint8 [B,H,W,C] images or float32 [B,D] vectors
- mask: bool [B,T], True at real tokens; padding is on the right (absent for causal_lm, whose blocks are full)
- segments: int32 [B,T], 1 in the second text of a pair (only with two text columns)
- labels: int32 [B] classes, float32 [B,K] targets, int32 [B,T] tokens (masked_lm, causal_lm) or int32 [B,T] word tags
- weights: float32 [B] or [B,T], matching the labels; 0 for padding and for positions without a prediction
- index: int32 [B], the position of each example in the global batch
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxpar.data import images, synthetic, text
from jaxpar.data.batches import Batches
from jaxpar.data.cache import cache_dir
from jaxpar.data.check import check_data
from jaxpar.data.class_weights import weighted
from jaxpar.data.examples import DataInfo, Dataset, Labels, Split, read_info, write_info
from jaxpar.data.share import with_share

__all__ = [
    "Batches",
    "DataInfo",
    "Dataset",
    "Labels",
    "Split",
    "cache_dir",
    "check_data",
    "load",
    "read_info",
    "write_info",
]


def load(config: ConfigDict, labels: Labels, workdir: Path) -> Dataset:
    """Load the data set with the given kind of labels.

    Token arrays are read from the cache, or created there. The tokenizer of a text data set is saved as
    workdir/tokenizer.json.

    Reads config.data, outer, model.name, model.init_from, cache_dir and seed. Raises UserError if a key, a file or the
    contents of a file are invalid.
    """
    check_data(config, labels)
    if config.data.source == "synthetic":
        dataset = synthetic.load(config, labels)
    elif config.data.source in images.IMAGE_READERS:
        dataset = images.load(config)
    else:
        dataset = text.load(config, labels, workdir)
    return with_share(weighted(dataset, config.data.class_weights), config)
