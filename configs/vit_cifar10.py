"""ViT with 4x4 patches on CIFAR-10, read from the original files.

    scripts/train --config=configs/vit_cifar10.py --workdir=runs/vit --config.data.train=DIR

DIR contains data_batch_1 to data_batch_5 and test_batch, or the same files as .bin. This config is meant for GPUs. To
try it on a CPU, use synthetic images:
--config.data.source=synthetic --config.num_steps=20 --config.batch_size=16
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config


def get_config() -> ConfigDict:
    """Return a config that trains 6 layers of width 192 for 100 epochs with AdamW, on random crops and flips."""
    config = default_config()
    config.model.name = "vit"
    config.model.size = "tiny"
    config.model.num_layers = 6
    config.model.patch_size = 4
    config.model.dtype = "bfloat16"
    config.data.source = "cifar10"
    config.data.augment = True
    config.num_epochs = 100.0
    config.optimizer.weight_decay = 0.05
    config.checkpoint.every_steps = 1000
    return config
