"""ResNet-18 with group normalisation on CIFAR-10, from the data set's own files.

    scripts/train --config=configs/resnet_cifar10.py --workdir=runs/resnet --config.data.train=DIR

DIR holds data_batch_1 .. test_batch, or their .bin form. For GPUs; on a CPU try it on
made-up images: --config.data.source=synthetic --config.num_steps=20 --config.batch_size=16
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config


def get_config() -> ConfigDict:
    """30 epochs of SGD with momentum, random crops and flips."""
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
