"""Profiles of layers: sizes and estimates by hand, and the command that writes them."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.choose.costs.layer_programs import LayerPrograms
from jaxpar.choose.costs.profile import read_profile
from jaxpar.choose.costs.rates import EFFICIENCY
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.cluster import named_cluster
from jaxpar.commands import partition_profile
from tests.runs import run_script, script_error, small_arguments
from tests.strategies.pipelines import BATCH, LENGTH, Task, make_batch, make_config, make_problem, pipeline, shared

GPT = Task("gpt", "causal_lm", layers=3)


def test_sizes_of_layers() -> None:
    problem, batch = make_problem(make_config(GPT), GPT), make_batch(GPT, 0)
    layers = LayerPrograms(problem, batch, remat="none").measure(batch, repeats=2)
    assert [layer.name for layer in layers] == [layer.name for layer in problem.model.layers]
    width = problem.model.shapes["embed"]["tokens"].shape[1]
    assert {layer.output_bytes for layer in layers[:-1]} == {4 * BATCH * LENGTH * width}
    assert layers[-1].output_bytes == 0  # the loss
    for layer in layers:
        leaves = jax.tree.leaves(problem.model.shapes[layer.name])
        copied = [tie for tie in problem.model.ties if tie.layer == layer.name]
        tied = [problem.model.shapes[tie.source][tie.source_name] for tie in copied]
        assert layer.weight_bytes == sum(4 * leaf.size for leaf in [*leaves, *tied])
        assert layer.forward_s > 0
        assert layer.backward_s > 0


def test_blocks_share_a_measurement_and_stash_what_a_pipeline_stashes() -> None:
    """A pipeline of one layer per stage packs what the layers stash; the packed stash is slightly larger."""
    config = make_config(GPT, *pipeline("gpipe", 5, "--config.pipeline.partition=uniform"))
    problem, plan = make_problem(config, GPT), shared(GPT, *pipeline("gpipe", 5)).plan
    microbatch = make_batch(GPT, 0, BATCH // config.pipeline.num_microbatches)
    programs = LayerPrograms(problem, microbatch, remat="none")
    layers = programs.measure(microbatch, repeats=1)
    assert layers[1][1:] == layers[2][1:] == layers[3][1:]
    assert len(set(programs.numbers)) == 3
    slots = config.pipeline.num_microbatches  # of GPipe
    most = slots * max(layer.stash_bytes for layer in layers)
    assert most <= plan.memory[0]["stashes"] < 1.01 * most


def test_remat_reduces_the_stash() -> None:
    problem, batch = make_problem(make_config(GPT), GPT), make_batch(GPT, 0)
    none, full = (LayerPrograms(problem, batch, remat=remat).measure(batch, repeats=1) for remat in ("none", "full"))
    assert full[1].stash_bytes == 4 * BATCH * LENGTH * problem.model.shapes["embed"]["tokens"].shape[1]  # its input
    assert none[1].stash_bytes > 5 * full[1].stash_bytes


def test_estimates_by_the_roofline() -> None:
    """By hand, for a linear layer of an MLP on a GPU with fast memory: its products at the rate of the GPU."""
    task = Task("mlp", "classification", layers=3)
    problem, batch = make_problem(make_config(task), task), make_batch(task, 0)
    there = replace(named_cluster("H100", 1), memory_bandwidth=1e30, peak_flops={"float32": 1e6}, launch_seconds=0.0)
    hidden = TracedLayers(problem, there).profile(len(batch["index"]), "none")[1]
    [kernel] = [leaf for leaf in jax.tree.leaves(problem.model.layers[1].shapes) if len(leaf.shape) == 2]
    rows = hidden.output_bytes / 4 / kernel.shape[1]
    assert hidden.forward_s == pytest.approx(2 * rows * np.prod(kernel.shape) / (EFFICIENCY["float32"] * 1e6))
    assert hidden.backward_s == pytest.approx(2 * hidden.forward_s)


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    flags = "--config=configs/default.py", f"--out={path}", "--device=A100-80GB"
    assert run_script(monkeypatch, partition_profile, *small_arguments(tmp_path), *flags) == 0
    layers = read_profile(path)
    table = capsys.readouterr().out.splitlines()[-len(layers) - 1 :]
    assert table[0].split() == ["layer", "forward", "backward", "output", "stash", "weights"]
    assert [line.split()[0] for line in table[1:]] == [layer.name for layer in layers]
    assert table[2].split()[1] == f"{layers[1].forward_s * 1e3:.3g}"


WRONG = {
    "--config=configs/default.py": "--out is missing; it must be set",
    "--config=configs/default.py --out=nowhere/x.json": "--out is 'nowhere/x.json'; it must be the path of a file",
    "--config=configs/default.py --out=.": "--out is '.'; it must be the path of a file in a folder that exists",
    "--config=configs/default.py --out=x.json --device=H10": "--device is 'H10'; it must be one of a100-40gb, ",
    "--config=configs/default.py --out=x.json --microbatch_size=9999": "--microbatch_size is 9999; it must be at most ",
}


@pytest.mark.parametrize("flags", WRONG)
def test_mistakes(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = *small_arguments(tmp_path), *flags.split()
    _, message = script_error(monkeypatch, capsys, partition_profile, *arguments)
    assert message.startswith(WRONG[flags])
