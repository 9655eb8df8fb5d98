"""Writes tests/recorded/: a tiny checkpoint of every family, and transformers' results on it. Run by hand.

    python tests/make_recorded.py

Needs torch and transformers. The tests that read the files need neither.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from families import DEMO_EVERY, FAMILIES, NEW_TOKENS, PREFIXES, PROMPT_TOKENS, RECORDED, Expected, Family

from lazyllm.checkpoints.pypi_models import SMOLLM2, demo_model, gguf_file

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DEMO_PROMPT_TOKENS, DEMO_NEW_TOKENS = 256, 64
LONG_TEXT = " ".join(f"In year {n} the harbour took in {n % 7} ships more." for n in range(1900, 1930))
DEMO_TOKENS = RECORDED / "smollm2_tokens.json"
DEMO_TEXTS = [text for text, _ in json.loads(DEMO_TOKENS.read_text(encoding="utf-8"))["texts"]]
MIN_MARGIN = 1e-3  # between the best and the second logit of every greedy choice


def random_model(family: Family, seed: int) -> Any:
    """A model whose random weights give uneven attention, rounded to the family's stored type."""
    config = transformers.AutoConfig.for_model(**family.oracle_config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    centre = 0.0 if config.model_type.startswith("gemma") else 1.0  # Gemma's norms multiply by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                values = centre + 0.1 * noise
            elif parameter.dim() == 1:
                values = 0.3 * noise
            else:
                values = noise if "embed_tokens" in name else 1.4 * noise / parameter.shape[1] ** 0.5
            parameter.copy_(values.to(TORCH_DTYPES[family.dtype]))
    return model


def answers(model: Any, prompt: list[int], prefixes: Sequence[int], count: int) -> tuple[Expected, float]:
    """The results of transformers, and the smallest margin of its greedy choices."""
    ids, margin = list(prompt), float("inf")
    with torch.no_grad():
        # one pass for each prefix: with longrope, angles depend on the context's length
        rows = [model(torch.tensor([prompt[:n]])).logits[0, -1].float().numpy() for n in prefixes]
        for _ in range(count):
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
    return Expected(prompt, list(prefixes), np.stack(rows), ids[len(prompt) :]), margin


def save_family(family: Family, folder: Path, seed: int = 0) -> Expected:
    """The results of transformers for the family's checkpoint, which is written into `folder`."""
    prompt = np.random.default_rng(seed).integers(0, family.config["vocab_size"], PROMPT_TOKENS).tolist()
    margin = 0.0
    while margin < MIN_MARGIN:
        model = random_model(family, seed)
        expected, margin = answers(model, prompt, PREFIXES, NEW_TOKENS)
        seed += 1000
    stored = model.to(TORCH_DTYPES[family.dtype])
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.state_dict().values())
    stored.save_pretrained(folder, max_shard_size=size // family.shards + 4096)
    (folder / "config.json").write_text(json.dumps(family.config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").unlink(missing_ok=True)
    return expected


def demo_tokenizer(gguf_path: Path) -> Any:
    """transformers' tokenizer for the demonstration model's GGUF file.

    transformers does not support its pre-tokenizer, "smollm", which is set here: single digits are split off,
    then GPT-2's rule applies.
    """
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def record_demo() -> None:
    """Records token ids of the demonstration model, and part of its logits."""
    tokenizer = demo_tokenizer(gguf_file(SMOLLM2, progress=False))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    chat = tokenizer.encode(text, add_special_tokens=False)
    texts = [[text, tokenizer.encode(text)] for text in DEMO_TEXTS]
    recorded = {"texts": texts, "messages": messages, "chat": chat}
    DEMO_TOKENS.write_text(json.dumps(recorded, ensure_ascii=False) + "\n", encoding="utf-8")
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).eval()
    prompt = tokenizer.encode(LONG_TEXT)[:DEMO_PROMPT_TOKENS]
    expected, _ = answers(model, prompt, (1, DEMO_PROMPT_TOKENS // 2, DEMO_PROMPT_TOKENS), DEMO_NEW_TOKENS)
    replace(expected, logits=expected.logits[:, ::DEMO_EVERY]).save(RECORDED / "smollm2_logits.npz")


def main() -> None:
    torch.set_num_threads(1)
    shutil.rmtree(RECORDED / "families", ignore_errors=True)
    for seed, (name, family) in enumerate(FAMILIES.items()):
        folder = RECORDED / "families" / name
        folder.mkdir(parents=True)
        save_family(family, folder, seed).save(folder / "expected.npz")
        print(f"{name}: {sum(path.stat().st_size for path in folder.iterdir())} bytes")
    record_demo()


if __name__ == "__main__":
    main()
