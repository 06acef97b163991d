"""BERT for the comparison of strategies: 128 tokens, 128 texts per batch.

    scripts/train --config=configs/compare_bert.py --workdir=runs/one
    jaxpar compare strategies --config=configs/compare_bert.py --workdir=runs/compare

Reaches 36% test accuracy on WordNet glosses, with a learning rate of 5e-3: at 2e-5, a small model learns nothing from
scratch. Preset `base`: an epoch of BERT-base at 2e-5 on GPUs, with your data and weights (--config.model.init_from).
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config
from jaxpar.errors import UserError


def get_config(preset: str = "small") -> ConfigDict:
    """Return the config of BERT-base, or of a small model and an eighth of an epoch on 2 virtual CPU devices."""
    if preset not in ("small", "base"):
        raise UserError(f"the preset of --config is {preset!r}; it must be one of small, base")
    config = default_config()
    if preset == "base":
        config.model.size, config.optimizer.lr = "base", 2e-5
        config.eval.every_steps = 500
    else:
        config.model.update({"hidden_size": 64, "num_heads": 1, "mlp_size": 128, "dropout": 0.0, "pooling": "mean"})
        config.mesh.virtual_cpu_devices = 2
        config.optimizer.lr, config.num_epochs, config.eval.every_steps = 5e-3, 0.12, 20
        config.data.validation_fraction, config.data.test_fraction = 0.01, 0.02
    config.data.max_length, config.data.length_buckets = 128, (128,)
    config.batch_size = 128
    config.log.every_steps = 10
    return config
