"""SHA-256 of opened files, and of a checkpoint: its config and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.support.files import FileState, OpenedFile
from lazyllm.support.progress import bar

MIB = 20  # the shift from bytes to MiB

Known = dict[tuple[tuple[Path, FileState], ...], str]
known: Known = {}
"""The digests that were taken in this process, by the paths and states of the files."""


def weights_digest(checkpoint: Checkpoint, progress: bool) -> str:
    """The digest of the files that were opened, whatever their paths lead to now."""
    return digest([*checkpoint.config_files, *checkpoint.shard_files], progress)


def digest(files: Sequence[OpenedFile], progress: bool) -> str:
    """SHA-256 of the concatenated files; read once in a process for each state of the files."""
    key = tuple((file.path, file.state) for file in files)
    if key not in known:
        hasher, n_hashed = hashlib.sha256(), 0
        total = sum(file.state[1] for file in files)  # bytes
        with bar(total >> MIB, "hashing the model", "MiB", progress) as line:
            for file in files:
                for block in file.blocks():
                    hasher.update(block)
                    n_hashed += len(block)
                    line.update((n_hashed >> MIB) - line.n)  # whole MiB only
        known[key] = hasher.hexdigest()
    return known[key]
