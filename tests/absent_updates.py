"""Compares the memory of pipelines in lockstep, planned for eight H100s that this machine does not have, with programs.

    python -m tests.absent_updates

The update needs most: batches are small, and the stages differ in the embedding, the head and a block. Prints planned /
compiled bytes of a device by exchange, as JSON.
"""

import json

from jaxpar.cluster.target import find_target
from scripts.bench import planned_memory as cases
from scripts.bench.large_models import Case

SETTINGS = {
    **{"model.num_layers": 5, "model.hidden_size": 512, "model.num_heads": 8, "model.attention": "xla"},
    **{"model.tied_embeddings": False, "data.max_length": 64, "data.vocab_size": 8192, "batch_size": 16},
    **{"mesh.stage": 2, "pipeline.num_microbatches": 4, "pipeline.remat": "full"},
}


def main() -> None:
    """Compile the pipelines, and print the ratios."""
    ratios = {}
    for exchange in ("ddp", "zero1"):
        values = cases.GPT_8 | cases.IN_LOCKSTEP | SETTINGS | {"exchange": exchange}
        costs, needed, _ = cases.compare(*cases.of_large(Case("h100:8", values)), find_target("h100:8"))
        ratios[exchange] = costs.nbytes / sum(needed.values())
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
