"""Pretraining of a GPT of any size on text files. The preset is a config.model.size, such as gpt2_xl or llama_1b.

    scripts/train --config=configs/gpt.py:gpt2 --config.data.source=text --config.data.train=TEXTS --workdir=runs/gpt

TEXTS is a path or a glob, such as 'books/*.txt'. Without both data flags, the texts are WordNet's. The values suit
GPUs; plan a size first (docs/howto/plan.md). Of this config, only the size tiny was trained, for a few steps on a CPU.
docs/results/gpu/one_gpu.md has times of steps of gpt2 and llama_1b, with other batches.
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config
from jaxpar.errors import UserError
from jaxpar.models.gpt import SIZES


def get_config(preset: str = "gpt2") -> ConfigDict:
    """Return the config of an epoch over blocks of 1,024 tokens in bfloat16, with 262,144 tokens in a step."""
    if preset not in SIZES:
        raise UserError(f"the preset of --config is {preset!r}; it must be one of {', '.join(SIZES)}")
    config = default_config()
    config.task, config.model.name, config.model.size = "causal_lm", "gpt", preset
    config.model.dtype, config.model.remat, config.model.dropout = "bfloat16", "full", 0.0
    config.model.vocab_size = 128_256 if preset.startswith("llama") else 50_304  # rows, whatever the tokenizer has
    if preset.startswith("llama"):  # as Llama 3, and only its small models tie the head
        config.model.rope_base, config.model.tied_embeddings = 500_000.0, preset == "llama_1b"
    config.data.vocab_size, config.data.max_length, config.data.length_buckets = 50_257, 1024, (1024,)
    config.batch_size = 256
    config.optimizer.lr, config.optimizer.warmup, config.optimizer.final_lr = 3e-4, 0.02, 0.1
    config.optimizer.b2, config.optimizer.weight_decay = 0.95, 0.1
    return config
