"""The half of scripts/bench/peers.py that runs torch: the same GPT, trained by torch's means. Does not import jaxpar.

    python scripts/bench/peers_torch.py CASE STRATEGY RANK THREADS DEVICE

CASE is the .npz file of the weights and the batch, STRATEGY single, ddp or 1f1b, DEVICE cpu, or cuda for single, which
is then compiled and computes in bfloat16 by autocast, or on GPUs without bfloat16 in float16, without scaling the loss.
Takes a training step for each line of the standard input, and prints the share of this process in the loss.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

HEAD = 64  # features of an attention head
MICROBATCHES = 8
LR = 0.1
EPS = 1e-5


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, *, is_rms: bool):
        super().__init__()
        self.attention_norm, self.mlp_norm = (norm(width, is_rms=is_rms) for _ in range(2))
        self.attention = nn.ModuleDict(
            {name: nn.Linear(width, width, bias=not is_rms) for name in ("query", "key", "value", "out")}
        )
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(width, 4 * width, bias=not is_rms), "down": nn.Linear(4 * width, width, bias=not is_rms)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block: [B, T, D] -> [B, T, D]."""
        normed = self.attention_norm(x)
        q, k, v = (
            self.attention[name](normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in ("query", "key", "value")
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["out"](y.transpose(1, 2).flatten(2))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.mlp_norm(x)), approximate="tanh"))


class Embed(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocab: int, length: int, width: int):
        super().__init__()
        self.tokens, self.positions = nn.Parameter(torch.empty(vocab, width)), nn.Parameter(torch.empty(length, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed token ids: [B, T] -> [B, T, D]."""
        return F.embedding(tokens, self.tokens) + self.positions


class Head(nn.Module):
    """The final norm, and the token embedding as the decoder."""

    def __init__(self, vocab: int, width: int, *, is_rms: bool):
        super().__init__()
        self.norm, self.tokens = norm(width, is_rms=is_rms), nn.Parameter(torch.empty(vocab, width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits: [B, T, D] -> [B, T, V]."""
        return F.linear(self.norm(x), self.tokens)


def norm(width: int, *, is_rms: bool) -> nn.Module:
    """Return a norm over the features."""
    return nn.RMSNorm(width, eps=EPS) if is_rms else nn.LayerNorm(width, eps=EPS)


def gpt(arrays: dict[str, np.ndarray]) -> nn.Sequential:
    """Return the model with these weights, named as in jaxpar. The head has a copy of the embedding."""
    (vocab, width), length = arrays["embed.tokens"].shape, len(arrays["embed.positions"])
    is_rms, num_layers = "head.norm.bias" not in arrays, sum(name.endswith(".up.kernel") for name in arrays)
    model = nn.Sequential()
    model.add_module("embed", Embed(vocab, length, width))
    for i in range(num_layers):
        model.add_module(f"block_{i}", Block(width, is_rms=is_rms))
    model.add_module("head", Head(vocab, width, is_rms=is_rms))
    arrays = arrays | {"head.tokens": arrays["embed.tokens"]}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{owner}.kernel" in arrays:
            value = arrays[f"{owner}.kernel"].T
        else:
            value = arrays[f"{owner}.{'scale' if leaf == 'weight' else leaf}"]
        with torch.no_grad():
            parameter.copy_(torch.tensor(value))
    return model


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def on_gpu(model: nn.Sequential, inputs: Tensor, labels: Tensor) -> Callable[[], float]:
    """Return a function that computes gradients by a compiled model in 16 bits, and returns the loss."""
    model.head.tokens = model.embed.tokens
    torch.set_float32_matmul_precision("high")
    half = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16

    def loss_of_batch() -> Tensor:
        with torch.autocast("cuda", half):
            return loss_of(model(inputs), labels)

    compiled = torch.compile(loss_of_batch)

    def gradients() -> float:
        loss: Tensor = compiled()
        loss.backward()
        return loss.item()

    return gradients


def data_parallel(model: nn.Sequential, inputs: Tensor, labels: Tensor, world: int) -> Callable[[], float]:
    """Return a function that computes gradients, on one process or with DDP, and returns this process's share."""
    model.head.tokens = model.embed.tokens
    replica = DistributedDataParallel(model) if world > 1 else model

    def gradients() -> float:
        loss = loss_of(replica(inputs), labels)
        loss.backward()
        return loss.item() / world

    return gradients


def pipeline(model: nn.Sequential, inputs: Tensor, labels: Tensor, rank: int) -> tuple[nn.Module, Callable[[], float]]:
    """Return the stage of this process, and a function that computes its gradients and returns its loss."""
    middle = len(model) // 2
    part = model[:middle] if rank == 0 else model[middle:]
    tied = (part.embed if rank == 0 else part.head).tokens
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def gradients() -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        dist.all_reduce(tied.grad)  # the gradients of the embedding and of the decoder
        return sum(loss.item() for loss in losses) / MICROBATCHES

    return part, gradients


def main(case: str, strategy: str, rank: int, threads: int, device: str) -> None:
    """Take a step for each line of the standard input."""
    torch.set_num_threads(threads)
    arrays = dict(np.load(case))
    inputs, labels = (torch.tensor(arrays.pop(name), dtype=torch.int64).to(device) for name in ("inputs", "labels"))
    world = 1 if strategy == "single" else 2
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{Path(case).parent}/store", rank=rank, world_size=world)
    model: nn.Module = gpt(arrays).to(device)
    if device == "cuda":
        gradients = on_gpu(model, inputs, labels)
    elif strategy == "1f1b":
        model, gradients = pipeline(model, inputs, labels, rank)
    else:
        gradients = data_parallel(model, inputs.chunk(world)[rank], labels.chunk(world)[rank], world)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in sys.stdin:
        optimizer.zero_grad()
        loss = gradients()
        optimizer.step()
        print(loss, flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
