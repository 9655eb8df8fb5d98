"""LongBench: its prompts, metrics and rules, run on lazyllm under any setting; resumable, repeatable."""

from lazyllm.longbench.prompt import prompt_ids
from lazyllm.longbench.run import Run, run
from lazyllm.longbench.scoring import score

__all__ = ["Run", "prompt_ids", "run", "score"]
