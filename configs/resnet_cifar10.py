"""ResNet-18 with group normalization on CIFAR-10, read from the original files.

    scripts/train --config=configs/resnet_cifar10.py --workdir=runs/resnet --config.data.train=DIR

DIR contains data_batch_1 to data_batch_5 and test_batch, or the same files as .bin. This config is meant for GPUs. To
try it on a CPU, use synthetic images:
--config.data.source=synthetic --config.num_steps=20 --config.batch_size=16
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config


def get_config() -> ConfigDict:
    """Return a config that trains for 30 epochs with SGD with momentum, on random crops and flips."""
    config = default_config()
    config.model.name = "resnet"
    config.model.size = "18"
    config.model.dtype = "bfloat16"
    config.data.source = "cifar10"
    config.data.augment = True
    config.num_epochs = 30.0
    config.optimizer.name = "sgd"
    config.optimizer.lr = 0.1
    config.optimizer.weight_decay = 5e-4
    config.checkpoint.every_steps = 1000
    return config
