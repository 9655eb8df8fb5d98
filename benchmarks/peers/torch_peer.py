"""transformers as a peer, and single ops of torch and of NumPy's BLAS."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring.rounds import repeated, timed

CPU = "cpu"
QUEUED = 32  # runs of an op between two synchronizations with a CUDA device


class Torch:
    """torch on one device. Times include the wait until the device has finished."""

    def __init__(self, device: str, threads: int) -> None:
        import torch

        if device == CPU:
            torch.set_num_threads(threads)
        elif not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        self.api: Any = torch
        self.device = device

    def wait(self) -> None:
        if self.device != CPU:
            self.api.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def turn(self, op: Callable[[], object]) -> float:
        """Mean seconds of an op, repeated for a turn; on a CUDA device the runs are queued."""
        with self.api.inference_mode():
            if self.device == CPU:
                return repeated(timed(op))
            return self.seconds(lambda: [op() for _ in range(QUEUED)]) / QUEUED

    def values(self, *shape: int) -> Any:
        dtype = self.api.float32 if self.device == CPU else self.api.bfloat16
        return (self.api.rand(*shape, device=self.device) - 0.5).to(dtype)


class TransformersPeer:
    def __init__(self, folder: Path, dtype: str, device: str, threads: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._torch = Torch(device, threads)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(self._torch.api, dtype), attn_implementation="sdpa", local_files_only=True
        )
        self._model = model.to(device).eval()

    def prefill(self, ids: list[int]) -> float:
        """Seconds from token ids to the logits of the last one, with a KV cache."""

        def work() -> None:
            tensor = self._torch.api.tensor([ids], device=self._torch.device)
            with self._torch.api.inference_mode():
                output = self._model(tensor, use_cache=True, logits_to_keep=1)
            self._cache, self._last = output.past_key_values, output.logits

        return self._torch.seconds(work)

    def decode(self, ids: list[int]) -> float:
        """Seconds of one decode step per token, appended to the current context."""

        def work() -> None:
            with self._torch.api.inference_mode():
                for token in ids:
                    output = self._model(
                        self._torch.api.tensor([[token]], device=self._torch.device),
                        past_key_values=self._cache,
                        use_cache=True,
                        logits_to_keep=1,
                    )
                    self._cache = output.past_key_values

        return self._torch.seconds(work)

    def logits(self, ids: list[int]) -> np.ndarray:
        self.prefill(ids)
        return np.asarray(self._last[0, -1].float().cpu().numpy())


class TorchProduct:
    """x @ w.T of (n, cols) and (rows, cols): float32 on the CPU, bfloat16 on a CUDA device."""

    def __init__(self, device: str, threads: int) -> None:
        self._torch = Torch(device, threads)

    def prepare(self, n: int, rows: int, cols: int) -> None:
        self._x, self._w = self._torch.values(n, cols), self._torch.values(rows, cols)

    def run(self) -> float:
        return self._torch.turn(lambda: self._torch.api.nn.functional.linear(self._x, self._w))


class TorchAttention:
    """Causal attention in bfloat16 on a CUDA device, by cuDNN, or by FlashAttention where cuDNN refuses."""

    def __init__(self, device: str) -> None:
        self._torch = Torch(device, threads=0)
        choice: Any = self._torch.api.nn.attention
        kernels = [choice.SDPBackend.CUDNN_ATTENTION, choice.SDPBackend.FLASH_ATTENTION]
        self._fused: Callable[[], Any] = lambda: choice.sdpa_kernel(kernels, set_priority=True)

    def prepare(self, n: int, head_dim: int, n_heads: int, n_kv_heads: int) -> None:
        heads = (n_heads, n_kv_heads, n_kv_heads)
        self._qkv = [self._torch.values(1, count, n, head_dim) for count in heads]

    def run(self) -> float:
        attend = self._torch.api.nn.functional.scaled_dot_product_attention
        with self._fused():
            return self._torch.turn(lambda: attend(*self._qkv, is_causal=True, enable_gqa=True))


class NumpyProduct:
    """float32 products by NumPy's BLAS."""

    def prepare(self, n: int, rows: int, cols: int) -> None:
        random = np.random.default_rng(0)
        self._x = random.random((n, cols), np.float32) - np.float32(0.5)
        self._w = random.random((rows, cols), np.float32) - np.float32(0.5)
        self._y = np.empty((n, rows), np.float32)

    def run(self) -> float:
        return repeated(timed(lambda: np.matmul(self._x, self._w.T, out=self._y)))
