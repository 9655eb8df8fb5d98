"""Files written atomically, and files that are locks."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to disk under another name, then renames: a crash leaves the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def locked(path: Path, wait: bool = True) -> IO[str]:
    """The file, locked until it is closed or the process ends."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file
