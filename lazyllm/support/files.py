"""Paths of users, files written atomically, and files that are locks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO


def user_path(path: str | Path) -> Path:
    """The path that a user gave, with the home folder in place of ~."""
    return Path(os.path.expanduser(path))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is written to disk under another name, then renamed: a crash leaves the old file at `path`
    or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Writes text as a `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())


def locked(path: Path, wait: bool = True) -> IO[str]:
    """The file, locked until it is closed or the process ends."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file
