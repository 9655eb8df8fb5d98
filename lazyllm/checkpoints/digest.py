"""SHA-256 of files, and of a checkpoint: its config and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.support.progress import bar

BLOCK, MIB = 1 << 22, 20  # bytes; the shift from bytes to MiB

Known = dict[tuple[tuple[Path, int, int], ...], str]
_known: Known = {}


def known() -> Known:
    """The digests that were taken in this process, by the paths, sizes and times of the files."""
    return dict(_known)


def learn(digests: Known) -> None:
    """Takes over the digests of another process, for files that have not changed since."""
    _known.update(digests)


def weights_digest(checkpoint: Checkpoint, progress: bool) -> str:
    return digest([*checkpoint.config_files, *map(Path, checkpoint.shards)], progress)


def digest(paths: Iterable[Path], progress: bool) -> str:
    """SHA-256 of the concatenated files; cached in the process until a size or modification time changes."""
    files = list(paths)
    stats = [path.stat() for path in files]
    state = tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in zip(files, stats, strict=True))
    if state not in _known:
        _known[state] = read_digest(files, sum(stat.st_size for stat in stats), progress)
    return _known[state]


def read_digest(files: Sequence[Path], n_bytes: int, progress: bool) -> str:
    hasher = hashlib.sha256()
    n_hashed = 0
    with bar(n_bytes >> MIB, "hashing the model", "MiB", progress) as line:
        for path in files:
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    hasher.update(block)
                    n_hashed += len(block)
                    line.update((n_hashed >> MIB) - line.n)  # whole MiB only
    return hasher.hexdigest()
