"""Masked language modelling with BERT on WordNet glosses: a small example of pretraining.

scripts/train --config=configs/bert_mlm_wordnet.py --workdir=runs/mlm
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config


def get_config() -> ConfigDict:
    """Return the config of an encoder with 2 layers of width 128 that predicts 15% of the tokens."""
    config = default_config()
    config.task = "masked_lm"
    config.mesh.virtual_cpu_devices = 2
    config.data.vocab_size = 4096
    config.data.max_length = 48
    config.data.length_buckets = (16, 24, 48)
    config.batch_size = 128
    return config
