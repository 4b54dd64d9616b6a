"""Files that are written whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write `path` whole or not at all: to a temporary name, synced, then renamed. Raises `OSError` naming it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise OSError(
            error.errno, f"{path} was not written: {error.strerror}. What was finished before it is kept"
        ) from error
