"""Creates the references for tests/models/test_hf.py, and checks exported models, with Hugging Face libraries.

This is the only script that needs torch, transformers and sentence-transformers:

    python scripts/make_hf_reference.py                     # writes tests/models/reference
    python scripts/make_hf_reference.py --check DIR [...]   # compares exports DIR/NAME with the references

A reference is a directory of random weights, written by `save_pretrained`, with an additional file example.safetensors
that contains inputs, mask, segments (BERT only) and the logits in float32. That of bert_mean has no segments, and its
classifier is in the folder 2_Dense, as `sentence-transformers` saves it. The reference in
tests/use/inference contains the prompts `inputs` of `lengths` tokens and their greedy continuations `greedy`, up to the
longest text of the model.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Pooling

REFERENCE = Path(__file__).parents[1] / "tests" / "models" / "reference"
LENGTHS = torch.tensor([10, 3, 1, 7])  # real tokens of the examples
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
DECODER = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA = transformers.LlamaConfig(**DECODER, rms_norm_eps=1e-5, tie_word_embeddings=True)
# The first frequency is kept, the second interpolated, the others divided.
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = transformers.LlamaConfig(
    **DECODER, head_dim=8, rope_parameters={**SCALED, "rope_theta": 500.0, "original_max_position_embeddings": 64}
)
MISTRAL = transformers.MistralConfig(
    **DECODER, sliding_window=None, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
)
QWEN2 = transformers.Qwen2Config(**DECODER, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
MEAN = "bert_mean"
MODELS = {
    "bert_classification": (transformers.BertForSequenceClassification, BERT),
    "bert_masked_lm": (transformers.BertForMaskedLM, BERT),
    "gpt_causal_lm": (transformers.GPT2LMHeadModel, GPT2),
    "gpt_classification": (transformers.GPT2ForSequenceClassification, GPT2),
    "llama_causal_lm": (transformers.LlamaForCausalLM, LLAMA),
    "llama_classification": (transformers.LlamaForSequenceClassification, LLAMA),
    "llama3_causal_lm": (transformers.LlamaForCausalLM, LLAMA3),
    "mistral_causal_lm": (transformers.MistralForCausalLM, MISTRAL),
    "qwen2_causal_lm": (transformers.Qwen2ForCausalLM, QWEN2),
}


GENERATED = Path(__file__).parents[1] / "tests" / "inference" / "reference" / "gpt_generation"
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
    directory = GENERATED
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
    if not name.endswith("causal_lm"):
        example["mask"] = torch.arange(10)[None, :] < LENGTHS[:, None]
        example["inputs"] *= example["mask"]
    if name.startswith("bert"):
        example["segments"] = (torch.arange(10)[None, :] > torch.tensor([4, 1, 9, 9])[:, None]).long()
    model.save_pretrained(REFERENCE / name)
    (REFERENCE / name / "generation_config.json").unlink(missing_ok=True)
    example["logits"] = logits(model, example)
    save_file({key: value.contiguous() for key, value in example.items()}, REFERENCE / name / "example.safetensors")


def make_mean() -> None:
    """Write the reference of a BERT classifier that pools by the mean: encoder, pooling and linear map."""
    torch.manual_seed(len(MEAN))
    encoder = transformers.BertModel(BERT, add_pooling_layer=False).eval()
    dense = Dense(BERT.hidden_size, 3, activation_function=torch.nn.Identity())
    for parameter in (*encoder.parameters(), *dense.parameters()):
        parameter.data += 0.2 * torch.randn_like(parameter)
    example = {"inputs": torch.randint(1, 40, (4, 10)), "mask": torch.arange(10)[None, :] < LENGTHS[:, None]}
    example["inputs"] *= example["mask"]
    pooling = Pooling(BERT.hidden_size, pooling_mode="mean")
    with torch.no_grad():
        hidden = encoder(example["inputs"], attention_mask=example["mask"].long()).last_hidden_state
        features = pooling({"token_embeddings": hidden, "attention_mask": example["mask"].long()})
        example["logits"] = dense(features)["sentence_embedding"]
    encoder.save_pretrained(REFERENCE / MEAN)
    (REFERENCE / MEAN / "2_Dense").mkdir(exist_ok=True)
    dense.save(str(REFERENCE / MEAN / "2_Dense"))
    save_file({key: value.contiguous() for key, value in example.items()}, REFERENCE / MEAN / "example.safetensors")


def logits(model: Any, example: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits that `transformers` computes for the example."""
    arguments = {"input_ids": example["inputs"]}
    if "mask" in example:
        arguments["attention_mask"] = example["mask"].long()
    if "segments" in example:
        arguments["token_type_ids"] = example["segments"]
    with torch.no_grad():
        return model(**arguments).logits


def check_mean(directory: Path) -> bool:
    """Load DIR/bert_mean, compare the embeddings with the logits of the reference, and print the difference."""
    model = SentenceTransformer(str(directory), device="cpu").eval()
    example = load_file(REFERENCE / MEAN / "example.safetensors")
    with torch.no_grad():
        features = model({"input_ids": example["inputs"], "attention_mask": example["mask"].long()})
    difference = (features["sentence_embedding"] - example["logits"]).abs().max().item()
    print(f"{MEAN}: {[type(module).__name__ for module in model]}, max difference {difference:.1e}")
    print(f"  texts of at most {model.max_seq_length} tokens, {model.encode(['a word']).shape}")
    return difference < 1e-5


def check(directory: Path) -> bool:
    """Load DIR/NAME, an export of reference NAME, compare the logits, and print the largest difference."""
    kind, _ = MODELS[directory.name]
    automatic = {
        "bert_classification": transformers.AutoModelForSequenceClassification,
        "bert_masked_lm": transformers.AutoModelForMaskedLM,
        "gpt_causal_lm": transformers.AutoModelForCausalLM,
        "gpt_classification": transformers.AutoModelForSequenceClassification,
        "llama_causal_lm": transformers.AutoModelForCausalLM,
        "llama_classification": transformers.AutoModelForSequenceClassification,
        "llama3_causal_lm": transformers.AutoModelForCausalLM,
        "mistral_causal_lm": transformers.AutoModelForCausalLM,
        "qwen2_causal_lm": transformers.AutoModelForCausalLM,
    }[directory.name]
    model, report = automatic.from_pretrained(directory, output_loading_info=True)
    example = load_file(REFERENCE / directory.name / "example.safetensors")
    difference = (logits(model.eval(), example) - example["logits"]).abs().max().item()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    problems = {key: value for key, value in report.items() if value}
    kind = transformers.LlamaForCausalLM if directory.name.startswith("mistral") else kind  # the same without a window
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
        make_mean()
    else:
        good = [check_mean(one) if one.name == MEAN else check(one) for one in directories]
        sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
