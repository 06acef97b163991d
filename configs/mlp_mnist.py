"""An MLP on MNIST, read from the original files.

    scripts/train --config=configs/mlp_mnist.py --workdir=runs/mnist --config.data.train=DIR

DIR contains train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k files, plain or as .gz.
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config


def get_config() -> ConfigDict:
    """Return a config that trains the MLP for 5 epochs with AdamW."""
    config = default_config()
    config.model.name = "mlp"
    config.data.source = "mnist"
    config.batch_size = 128
    config.num_epochs = 5.0
    return config
