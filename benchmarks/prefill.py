"""Dense and pruned prefill of the demonstration model beside transformers f32, interleaved in one run.

    .venv/bin/python benchmarks/prefill.py --tokens 2048 --rounds 7

Needs torch and transformers (make oracle installs them). Prints each engine's median time to the first
token's logits and the ratios of the medians; a ratio above 1 means that lazyllm is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import lazyllm
from lazyllm.gguf import demo_model


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="prompt length (default 2048)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds after one warm-up (default 7)")
    parser.add_argument(
        "--speedup", type=float, default=2.0, help="counted-FLOP speedup of the pruned run (default 2)"
    )
    options = parser.parse_args()

    folder = demo_model()
    llm = lazyllm.load(folder)
    torch.set_num_threads(llm.threads)
    peer = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ids = np.random.default_rng(0).integers(0, llm.config.vocab, options.tokens)
    tensor = torch.from_numpy(ids)[None]
    pruning = lazyllm.Pruning.for_speedup(options.speedup, llm.config, options.tokens)

    def transformers_prefill() -> None:
        with torch.inference_mode():
            peer(tensor, use_cache=True, logits_to_keep=1)

    engines: dict[str, Callable[[], object]] = {
        "lazyllm dense": lambda: llm.session().forward(ids, progress=False),
        "lazyllm pruned": lambda: llm.session(pruning).forward(ids, progress=False),
        "transformers f32": transformers_prefill,
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(options.rounds + 1):
        for name, work in engines.items():
            elapsed = seconds(work)
            if round_:
                times[name].append(elapsed)

    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{options.tokens} tokens, {llm.threads} threads, {llm.core.isa}, median of {options.rounds}")
    for name, value in median.items():
        print(f"{name:18s} {value:8.3f} s   {min(times[name]):.3f} to {max(times[name]):.3f}")
    dense = median["lazyllm dense"]
    measured, counted = dense / median["lazyllm pruned"], pruning.speedup(llm.config, options.tokens)
    print(f"transformers f32 / lazyllm dense: {median['transformers f32'] / dense:.2f}")
    print(f"dense / pruned: {measured:.2f} measured, {counted:.2f} counted, {measured / counted:.2f} of it")
    print(f"pruned by {pruning}")


if __name__ == "__main__":
    main()
