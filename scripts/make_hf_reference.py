"""Creates the references for tests/models/test_hf.py, and checks exported models, with Hugging Face `transformers`.

This is the only script that needs torch and transformers:

    python scripts/make_hf_reference.py                     # writes tests/models/reference
    python scripts/make_hf_reference.py --check DIR [...]   # compares exports DIR/NAME with the references

A reference is a directory of random weights, written by `save_pretrained`, with an additional file example.safetensors
that contains inputs, mask, segments (BERT only) and the logits in float32. That of gpt_generation contains the prompts
`inputs` of `lengths` tokens and their greedy continuations `greedy`, up to the longest text of the model.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

REFERENCE = Path(__file__).parents[1] / "tests" / "models" / "reference"
BERT = transformers.BertConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=12,
    num_labels=3,
    pad_token_id=0,
)
GPT2 = transformers.GPT2Config(
    vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=12, num_labels=3, pad_token_id=0, eos_token_id=1
)
MODELS = {
    "bert_classification": (transformers.BertForSequenceClassification, BERT),
    "bert_masked_lm": (transformers.BertForMaskedLM, BERT),
    "gpt_causal_lm": (transformers.GPT2LMHeadModel, GPT2),
    "gpt_classification": (transformers.GPT2ForSequenceClassification, GPT2),
}


GENERATION = transformers.GPT2Config(
    vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=1
)


def make_generation() -> None:
    """Write the reference of generation: parameters so large that the continuations have many different tokens."""
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(GENERATION).eval()
    for parameter in model.parameters():
        parameter.data += 1.2 * torch.randn_like(parameter)
    inputs, lengths = torch.randint(2, 40, (3, 9)), torch.tensor([1, 4, 9])
    prompts = [text[None, :length] for text, length in zip(inputs, lengths, strict=True)]
    greedy = torch.cat(
        [model.generate(prompt, max_length=GENERATION.n_positions, do_sample=False) for prompt in prompts]
    )
    directory = REFERENCE / "gpt_generation"
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    save_file({"inputs": inputs, "lengths": lengths, "greedy": greedy}, directory / "example.safetensors")


def make(name: str) -> None:
    """Write one reference. All parameters are random, so that a test notices if one is not read."""
    kind, config = MODELS[name]
    torch.manual_seed(len(name))
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    example = {"inputs": torch.randint(1, 40, (4, 10))}
    if name != "gpt_causal_lm":
        example["mask"] = torch.arange(10)[None, :] < torch.tensor([10, 3, 1, 7])[:, None]
        example["inputs"] *= example["mask"]
    if name.startswith("bert"):
        example["segments"] = (torch.arange(10)[None, :] > torch.tensor([4, 1, 9, 9])[:, None]).long()
    model.save_pretrained(REFERENCE / name)
    (REFERENCE / name / "generation_config.json").unlink(missing_ok=True)
    example["logits"] = logits(model, example)
    save_file({key: value.contiguous() for key, value in example.items()}, REFERENCE / name / "example.safetensors")


def logits(model: Any, example: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits that `transformers` computes for the example."""
    arguments = {"input_ids": example["inputs"]}
    if "mask" in example:
        arguments["attention_mask"] = example["mask"].long()
    if "segments" in example:
        arguments["token_type_ids"] = example["segments"]
    with torch.no_grad():
        return model(**arguments).logits


def check(directory: Path) -> bool:
    """Load DIR/NAME, an export of reference NAME, compare the logits, and print the largest difference."""
    kind, _ = MODELS[directory.name]
    automatic = {
        "bert_classification": transformers.AutoModelForSequenceClassification,
        "bert_masked_lm": transformers.AutoModelForMaskedLM,
        "gpt_causal_lm": transformers.AutoModelForCausalLM,
        "gpt_classification": transformers.AutoModelForSequenceClassification,
    }[directory.name]
    model, report = automatic.from_pretrained(directory, output_loading_info=True)
    example = load_file(REFERENCE / directory.name / "example.safetensors")
    difference = (logits(model.eval(), example) - example["logits"]).abs().max().item()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    problems = {key: value for key, value in report.items() if value}
    good = type(model) is kind and difference < 1e-5 and not problems
    print(f"{directory.name}: {type(model).__name__}, max difference {difference:.1e}, {problems or 'all keys match'}")
    print(f"  {type(tokenizer).__name__}, {len(tokenizer)} tokens, {tokenizer('a word').input_ids}")
    return good


def main() -> None:
    """Write the references, or check exports; the exit code is 1 if an export differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", type=Path, metavar="DIR")
    directories = parser.parse_args().check
    if directories is None:
        for name in MODELS:
            make(name)
        make_generation()
    else:
        good = [check(directory) for directory in directories]
        sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
