"""Data: from files to deterministic batches of NumPy arrays. No JAX in this package.

`load` reads the sources, makes or opens the token arrays and gives a `Dataset`; `Batches` gives
the global batch at step t as a function of (seed, t) alone, whole or a shard of it.

A batch is a dict. Dims: B examples (always batch_size, with fillers), T positions, H W C of an image, D features.

- inputs: int32 [B,T] tokens, uint8 [B,H,W,C] images or float32 [B,D] vectors
- mask: bool [B,T], True at real tokens, padding on the right only (not with causal_lm: blocks are full)
- segments: int32 [B,T], 1 in the second of two texts (with two text columns only)
- labels: int32 [B] classes, float32 [B,K] targets, int32 [B,T] tokens (masked_lm, causal_lm) or classes of words
- weights: float32 [B], or [B,T] as the labels: 0 at fillers, padding and positions that are not predicted
- index: int32 [B], the place of the example in the global batch
"""

from jaxpar.data.batches import Batches
from jaxpar.data.cache import cache_dir
from jaxpar.data.check import check_data
from jaxpar.data.dataset import load
from jaxpar.data.examples import DataInfo, Dataset, Split
from jaxpar.data.labels import Labels

__all__ = ["Batches", "DataInfo", "Dataset", "Labels", "Split", "cache_dir", "check_data", "load"]
