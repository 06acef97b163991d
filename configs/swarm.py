"""A GPT on WordNet glosses, trained by 6 peers of which each fails every minute on average (emulated).

scripts/train --config=configs/swarm.py --workdir=runs/swarm_gpt

In its 200 steps, peers fail 71 times (docs/results/published/swarm.md).
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config


def get_config() -> ConfigDict:
    """Return the config of 3 stages with one block each, which is applied twice and sends half of its features."""
    config = default_config()
    config.task = "causal_lm"
    config.model.name = "gpt"
    config.model.num_layers = 3
    config.model.num_applications = 2
    config.model.bottlenecks = "block_1,block_2"
    config.strategy = "swarm"
    config.pipeline.partition = "narrow"
    config.swarm.stages = 3
    config.swarm.peers = "6"
    config.swarm.failures.lifetime = 60.0
    config.swarm.rebalance_seconds = 30.0
    config.swarm.compress = "int8"
    config.data.vocab_size = 4096
    config.data.max_length = 32
    config.batch_size = 24
    config.num_steps = 200
    config.optimizer.lr = 2e-3
    return config
