"""Functions that run LongBench and generated tasks under one or several settings; runs can be resumed."""

from lazyllm.evaluation.longbench.metrics import score
from lazyllm.evaluation.longbench.tasks import prompt_ids
from lazyllm.evaluation.report import Run
from lazyllm.evaluation.results import merge
from lazyllm.evaluation.run import run, run_niah, run_ruler

__all__ = ["Run", "merge", "prompt_ids", "run", "run_niah", "run_ruler", "score"]
