"""Functions that run LongBench and generated tasks under one or several settings; runs can be resumed."""

from lazyllm.evaluation.longbench.prompt import prompt_ids
from lazyllm.evaluation.longbench.scoring import score
from lazyllm.evaluation.run import Run, run, run_niah, run_ruler

__all__ = ["Run", "prompt_ids", "run", "run_niah", "run_ruler", "score"]
