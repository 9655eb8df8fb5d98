"""LongBench and generated tasks, run on lazyllm under any setting; resumable, repeatable."""

from lazyllm.longbench.prompt import prompt_ids
from lazyllm.longbench.run import Run, run, run_niah, run_ruler
from lazyllm.longbench.scoring import score

__all__ = ["Run", "prompt_ids", "run", "run_niah", "run_ruler", "score"]
