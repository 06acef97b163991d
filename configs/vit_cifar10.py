"""ViT with 4x4 patches on CIFAR-10, from the data set's own files.

    scripts/train --config=configs/vit_cifar10.py --workdir=runs/vit --config.data.train=DIR

DIR holds data_batch_1 .. test_batch, or their .bin form. For GPUs; on a CPU try it on
made-up images: --config.data.source=synthetic --config.num_steps=20 --config.batch_size=16
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config


def get_config() -> ConfigDict:
    """100 epochs of AdamW, random crops and flips, 6 layers of 192."""
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
