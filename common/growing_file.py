"""A file of JSON lines that grows while a long command runs, and that the same command continues after a kill."""

import fcntl
import json
import os
from pathlib import Path
from typing import BinaryIO, Self


class GrowingFile:
    """A context manager that holds the file open, and keeps other processes from writing to it.

    A killed process leaves whole lines and at most one torn one, which is cut off when the file is opened again.
    """

    def __init__(self, path: Path):
        self.path = path

    def take(self, row: dict, start: int) -> None:
        """What a subclass does with each line that is there already; `start` is the byte where it starts."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Raises `OSError` while another process holds the file, `ValueError` naming a line that is broken."""
        self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops it with the process
            self._take_all()
        except BlockingIOError as error:
            self._file.close()
            raise OSError(f"another run is writing to {self.path}") from error
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if error is None:
                os.fsync(self._file.fileno())
            self._file.close()  # which writes again what a full disk refused
        except OSError:
            if error is None:
                raise

    def _take_all(self) -> None:
        end = 0
        with self.path.open("r+b") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.take(json.loads(line), end)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{self.path}:{number} is broken: remove the line to make it again") from error
                end += len(line)
            file.truncate(end)

    def append(self, row: dict) -> None:
        """Write a line: a process that is killed after this has kept it. Raises `OSError` naming the file."""
        try:
            write_line(self._file, row)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.path} cannot be written ({error.strerror}): make room, and run the same command again",
            ) from error


def write_line(file: BinaryIO, row: dict) -> None:
    """The row as a line of JSON, handed to the system."""
    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    file.flush()


def drop_lines(path: Path, starts: set[int]) -> None:
    """Rewrite a file atomically without the lines that start at these bytes. Raises `OSError` that names it."""
    partial, position = path.with_name(f".{path.name}.partial"), 0
    try:
        with path.open("rb") as old, partial.open("wb") as new:
            for line in old:
                if position not in starts:
                    new.write(line)
                position += len(line)
            new.flush()
            os.fsync(new.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"{path} is complete, but was not rewritten without its repetitions ({error.strerror})"
        ) from error
