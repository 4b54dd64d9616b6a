"""Files and folders that are written atomically: whole or not at all."""

import os
import shutil
from contextlib import contextmanager
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


def check_output(output: str | Path) -> Path:
    """The resolved path of a folder to be made. Raises `FileExistsError` unless it is absent or empty."""
    output = Path(output).expanduser().resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists and is not an empty folder: choose another, or remove it first")
    return output


@contextmanager
def written_whole(output: Path, *, overwrite: bool = False):
    """A sibling folder that becomes `output` when the block ends, and vanishes when it fails.

    `output` is absent or empty; with `overwrite`, whatever it holds is replaced then, not before. What a killed
    process left behind is cleared away by the next.
    """
    partial, old = (output.with_name(f".{output.name}.{state}") for state in ("partial", "replaced"))
    if old.exists() and not output.exists():
        old.rename(output)
    for remains in (partial, old):
        shutil.rmtree(remains, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file() and not file.is_symlink():  # safetensors writes files that only their owner can read
                file.chmod(partial.stat().st_mode & 0o666)
        if output.exists() and not overwrite:
            output.rmdir()
        elif output.exists():
            output.rename(old)
        partial.rename(output)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
