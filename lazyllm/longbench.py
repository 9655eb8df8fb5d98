"""Functions that run LongBench and generated tasks under one or several settings; runs can be resumed."""

from lazyllm.evaluation.longbench.prompt import prompt_ids
from lazyllm.evaluation.longbench.scoring import score
from lazyllm.evaluation.merge import merge
from lazyllm.evaluation.run import Run, run, run_niah, run_ruler

__all__ = ["Run", "merge", "prompt_ids", "run", "run_niah", "run_ruler", "score"]
