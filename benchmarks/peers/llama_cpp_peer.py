"""llama.cpp as a peer, called through its C API: F16 weights and KV cache, flash attention."""

import ctypes
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = (2048, 512)  # tokens per batch; the faster one is used
CONTEXT_STEP = 256  # the context is rounded up to a multiple


@cache
def _silenced() -> tuple[Any, Any]:
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    return llama_cpp, quiet  # which the library goes on calling


def silent_api() -> Any:
    """llama.cpp's C API, which logs nothing."""
    return _silenced()[0]


class LlamaCppPeer:
    def __init__(self, file: Path, context: int, threads: int) -> None:
        self._api = api = silent_api()
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(file).encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not open {file}")
        self._n_ctx = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        self._threads = threads
        self._context: Any = None
        self._batch: Any = None
        self._length = 0
        self._open(BATCHES[0])

    def _open(self, batch: int) -> None:
        api = self._api
        if self._context:
            api.llama_free(self._context)
            api.llama_batch_free(self._batch)
        settings = api.llama_context_default_params()
        settings.n_ctx = self._n_ctx
        settings.n_batch = settings.n_ubatch = self._batch_size = min(batch, self._n_ctx)
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp opens no context of {self._n_ctx} tokens")
        self._batch = api.llama_batch_init(self._batch_size, 0, 1)

    def choose_batch(self, ids: list[int]) -> int:
        """Times each batch size on these tokens, after a warm-up, and keeps the fastest."""
        seconds = {}
        for batch in BATCHES:
            self._open(batch)
            self.prefill(ids)
            seconds[batch] = self.prefill(ids)
        best = min(seconds, key=seconds.__getitem__)
        self._open(best)
        return best

    def prefill(self, ids: list[int]) -> float:
        """Seconds from token ids to the logits of the last one, with an empty KV cache."""
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, False)
        self._length = 0
        started = time.perf_counter()
        for first in range(0, len(ids), self._batch_size):
            self._run(ids[first : first + self._batch_size], last=first + self._batch_size >= len(ids))
        return time.perf_counter() - started

    def decode(self, ids: list[int]) -> float:
        """Seconds of one decode step per token, appended to the current context."""
        started = time.perf_counter()
        for token in ids:
            self._run([token], last=True)
        return time.perf_counter() - started

    def logits(self, ids: list[int]) -> np.ndarray:
        self.prefill(ids)
        n_vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        last = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(last, (n_vocab,)).copy()

    def _run(self, ids: list[int], last: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = self._length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = last and i == len(ids) - 1
        if code := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with code {code}")
        self._api.llama_synchronize(self._context)
        self._length += len(ids)
