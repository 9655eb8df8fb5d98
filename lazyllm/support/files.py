"""Paths given by users; files that stay open, are written as a whole, or are locked; files of the system."""

import fcntl
import hashlib
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, BinaryIO

from lazyllm.support.progress import bar

BLOCK = 1 << 22  # bytes
MIB = 20  # the shift from bytes to MiB

FileState = tuple[int, int, int, int]


def file_state(stat: os.stat_result) -> FileState:
    """Inode, size, and times of the last write and change: they differ once a file is replaced or written to, on
    every machine that sees it. The device's number is left out: it may change when a machine starts."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class OpenedFile:
    """A file that stays open: reads are of the file that was opened, even if its path leads to another one later."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)
        self.state = file_state(os.fstat(self._number))

    def is_current(self) -> bool:
        """False once another file has its path, or it has been written to."""
        try:
            return file_state(os.stat(self.path)) == self.state
        except OSError:
            return False

    def read(self, begin: int, n_bytes: int) -> bytes:
        return os.pread(self._number, n_bytes, begin)

    def blocks(self) -> Iterator[bytes]:
        """Its contents; OSError if it has been written to since it was opened."""
        begin = 0
        while block := self.read(begin, BLOCK):
            yield block
            begin += len(block)
        if file_state(os.fstat(self._number))[:3] != self.state[:3]:  # renaming changes the last one, too
            raise OSError(f"{self.path} was written to while it was in use; load the model again")


known_digests: dict[tuple[tuple[Path, FileState], ...], str] = {}
"""The digests that were taken in this process, by the paths and states of the files."""


def digest(files: Sequence[OpenedFile], progress: bool) -> str:
    """SHA-256 of the concatenated files; read once in a process for each state of the files."""
    key = tuple((file.path, file.state) for file in files)
    if key not in known_digests:
        hasher = hashlib.sha256()
        with bar(sum(file.state[1] for file in files) >> MIB, "hashing the model", "MiB", progress) as line:
            for block in chain.from_iterable(file.blocks() for file in files):
                hasher.update(block)
                line.update(len(block) >> MIB)  # whole MiB only
        known_digests[key] = hasher.hexdigest()
    return known_digests[key]


def user_path(path: str | Path) -> Path:
    """The path that a user gave, with the home folder in place of ~."""
    return Path(os.path.expanduser(path))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is written under a temporary name, then renamed to `path`: after a crash `path` is the old file
    or the whole new one; a kill may leave the temporary file. Of several writers the last one wins."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def leave_cache(file: BinaryIO) -> None:
    """Writes the file out and drops it from the page cache, which holds it in small pages: when it is mapped next,
    file systems that can read it into huge ones."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_whole(path: Path, text: str) -> None:
    """Writes text as a `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())


def locked(path: Path) -> IO[str]:
    """The file, locked until it is closed or the process ends; BlockingIOError if another process has it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def system_text(file: Path) -> str:
    """The text of a file of the system; empty if it is missing or cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def system_values(file: Path, *names: str) -> list[str]:
    """The values with these names in a file of the system, whose lines are `name: value` or `name value`."""
    lines = (line.partition(":" if ":" in line else " ") for line in system_text(file).splitlines())
    return [value.strip() for name, _, value in lines if name.strip() in names]
