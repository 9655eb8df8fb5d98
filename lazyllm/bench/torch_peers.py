"""transformers as a peer, and the matrix products of torch and of NumPy's BLAS."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.bench.rounds import repeated, timed


class TransformersPeer:
    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch: Any = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()

    def prefill(self, ids: list[int]) -> float:
        """Seconds from token ids to the last one's logits, keys and values kept."""
        tensor = self._torch.tensor([ids])
        started = time.perf_counter()
        with self._torch.inference_mode():
            made = self._model(tensor, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - started
        self._cache, self._last = made.past_key_values, made.logits
        return seconds

    def decode(self, ids: list[int]) -> float:
        """Seconds of one step for each of these tokens, after whatever ran before."""
        started = time.perf_counter()
        with self._torch.inference_mode():
            for token in ids:
                made = self._model(
                    self._torch.tensor([[token]]),
                    past_key_values=self._cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                self._cache = made.past_key_values
        return time.perf_counter() - started

    def logits(self, ids: list[int]) -> np.ndarray:
        self.prefill(ids)
        return np.asarray(self._last[0, -1].float().numpy())


class TorchProduct:
    """x @ w.T in float32, of (n, cols) and (rows, cols)."""

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._torch: Any = torch

    def prepare(self, n: int, rows: int, cols: int) -> None:
        self._x, self._w = self._torch.rand(n, cols) - 0.5, self._torch.rand(rows, cols) - 0.5

    def run(self) -> float:
        with self._torch.inference_mode():
            return repeated(timed(lambda: self._torch.nn.functional.linear(self._x, self._w)))


class NumpyProduct:
    """The same by the BLAS that NumPy was built with."""

    def prepare(self, n: int, rows: int, cols: int) -> None:
        random = np.random.default_rng(0)
        self._x = random.random((n, cols), np.float32) - np.float32(0.5)
        self._w = random.random((rows, cols), np.float32) - np.float32(0.5)
        self._y = np.empty((n, rows), np.float32)

    def run(self) -> float:
        return repeated(timed(lambda: np.matmul(self._x, self._w.T, out=self._y)))
