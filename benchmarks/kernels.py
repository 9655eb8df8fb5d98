"""A prefill and a few decode steps of a 7B-shaped model with few layers on a GPU, for a profiler of kernels.

`ncu python -m benchmarks.kernels`; or `python -m benchmarks.kernels --cupti`, a table of kernels by torch.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lazyllm
from benchmarks.measuring.models import LARGE, write_model

LAYERS, TOKENS, STEPS, VOCAB, CONTEXT = 3, 2048, 4, 32000, 4096
DEVICE = "cuda"


def by_cupti(work: Callable[[], object], trace: Path) -> str:
    """The kernels of one run after one to warm up, those that take most of the time first."""
    from torch.profiler import ProfilerActivity, profile

    work()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    profiler.export_chrome_trace(str(trace))
    return table(json.loads(trace.read_text())["traceEvents"])


def table(events: list[dict[str, Any]]) -> str:
    """Launches and microseconds of each kernel. events: of a Chrome trace."""
    micros: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            micros[event["name"]].append(event["dur"])
    if not micros:
        raise SystemExit("the profiler saw no kernel")
    lines = [f"{'total µs':>12} {'launches':>9} {'mean µs':>10}  kernel"]
    for name, times in sorted(micros.items(), key=lambda entry: -sum(entry[1])):
        lines.append(f"{sum(times):12.1f} {len(times):9} {sum(times) / len(times):10.2f}  {name}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="lazyllm-kernels-") as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, replace(LARGE, n_layers=LAYERS), VOCAB, CONTEXT)
        llm = lazyllm.load(folder, device=DEVICE)
        ids, pruning = [i % VOCAB for i in range(TOKENS)], lazyllm.Pruning({0: 0.5})
        work = partial(llm.generate, ids, pruning, max_new_tokens=STEPS, stop=())
        print(by_cupti(work, Path(scratch) / "trace.json") if arguments == ["--cupti"] else repr(work()))


if __name__ == "__main__":
    main(sys.argv[1:])
