"""A GPT on WordNet glosses, like gpt_wordnet.py but with 6 layers, in a pipeline of four stages.

scripts/train --config=configs/pipeline_gpt.py --workdir=runs/pipeline
scripts/train --config=configs/pipeline_gpt.py:zb_h1 --workdir=runs/zb_h1
"""

from ml_collections import ConfigDict

from jaxpar.config import default_config
from jaxpar.errors import UserError
from jaxpar.strategies.pipeline.executor.partition import AUTO
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, unknown_schedule
from jaxpar.strategies.pipeline.tables.table_file import is_table_file


def get_config(preset: str = "auto") -> ConfigDict:
    """Return the config of 6 layers of width 128 on 4 devices with 8 microbatches; `preset` names the schedule."""
    if preset not in {*SCHEDULES, AUTO} and not is_table_file(preset):
        raise UserError(unknown_schedule("the preset of --config", preset, (AUTO,)))
    config = default_config()
    config.task = "causal_lm"
    config.model.name = "gpt"
    config.model.num_layers = 6
    config.strategy = "pipeline"
    config.mesh.stage = 4
    config.mesh.data = 1
    config.mesh.virtual_cpu_devices = 4
    config.pipeline.schedule = preset
    config.pipeline.num_microbatches = 8
    config.data.vocab_size = 4096
    config.data.max_length = 64
    config.batch_size = 32
    config.optimizer.lr = 2e-3
    return config
