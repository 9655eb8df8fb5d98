"""Complete model folders for tests: a tiny random model with a config and a byte-level tokenizer."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from families import family_config
from tiny import Shape, build
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lazyllm import Pruning

BOS, EOS, TURN = "<s>", "</s>", "<turn>"
SHAPE = Shape(vocab=300, context=600, n_layers=6, seed=3)
WIDE = Shape(vocab=300, n_layers=12, hidden=256, n_heads=8, n_kv_heads=8, head_dim=32, ffn=1024, context=4096)
"""Its passes over long prompts take seconds."""
IDS = list(range(40, 90))  # a prompt
STAGES = Pruning({1: 0.6, 3: 0.3})
PROMPTS = {
    "qasper": "Read. {context} Question: {input} Answer:",
    "trec": "{context} {input}",
    "lcc": "{context}{input}",
}
WORDS = ["the", "a", "cat", "dog", "river", "stone", "runs", "sleeps", "near", "under", "bright", "old"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def model_folder(
    folder: Path, shape: Shape = SHAPE, tokenizer: bool = True, eos: int | None = None, changed: Any = None
) -> Path:
    """Writes the model of `shape` into the new or empty `folder`; `eos` is the end token in config.json, `changed` has
    tensors that replace its own."""
    folder.mkdir(exist_ok=True)
    build(shape, folder, changed).path.rename(folder / "model.safetensors")
    config = family_config(
        "Qwen3MoeForCausalLM" if shape.n_experts else "LlamaForCausalLM",
        **shape.dimensions,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=eos,
    )
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token for each byte and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, TURN)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def benchmark(folder: Path, count: int, prompts: Mapping[str, str] = PROMPTS) -> Path:
    """Made-up items of each data set of `prompts`, in LongBench's form, with those templates."""
    folder.mkdir(exist_ok=True)
    for name in prompts:
        lines = [json.dumps(benchmark_item(name, number)) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "dataset2prompt.json").write_text(json.dumps(prompts))
    (folder / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(prompts, 6)))
    return folder


def benchmark_item(name: str, number: int) -> dict[str, Any]:
    return {
        "input": "where is the cat ?",
        "context": " ".join(random.Random(f"{name}{number}").choices(WORDS, k=60)),
        "answers": ["near the river"],
        "length": 60,
        "dataset": name,
        "language": "en",
        "all_classes": ["near", "under"] if name == "trec" else None,
        "_id": f"{name}-{number}",
    }


def markdown(text: str) -> list[str]:
    """The lines with marks of a report, which a terminal does not show."""
    return [line for line in text.splitlines() if line.startswith("|") or "![](" in line]


def untimed(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Result rows without what differs between two runs of the same trials."""
    return [{k: v for k, v in row.items() if k not in ("timing", "environment")} for row in rows]
