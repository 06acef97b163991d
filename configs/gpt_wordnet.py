"""A small GPT that learns to write dictionary definitions.

scripts/train --config=configs/gpt_wordnet.py --workdir=runs/gpt
scripts/train --config=configs/gpt_wordnet.py:llama --workdir=runs/llama
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config
from jaxpar.errors import UserError


def get_config(preset: str = "") -> ConfigDict:
    """Return the config of a GPT with 4 layers; preset `llama` adds RMSNorm, SwiGLU, rotary positions and GQA."""
    config = default_config()
    config.task = "causal_lm"
    config.model.name = "gpt"
    config.model.num_layers = 4
    config.mesh.virtual_cpu_devices = 2
    config.data.vocab_size = 4096
    config.data.max_length = 64
    config.batch_size = 32
    config.optimizer.lr = 2e-3
    if preset == "llama":
        config.model.norm = "rmsnorm"
        config.model.activation = "swiglu"
        config.model.positions = "rotary"
        config.model.num_kv_heads = 1
    elif preset:
        raise UserError(f"the preset of --config is {preset!r}; it must be 'llama', or left out")
    return config
