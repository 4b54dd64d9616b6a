"""Text files read, with errors that name them; files and folders written atomically: complete or not at all."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


def read_text(path: str | Path) -> str:
    """A UTF-8 file's text, without its byte order mark. Raises `ValueError` for another encoding, `OSError`."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_json(path: str | Path):
    """A JSON file's value. Raises `ValueError` that names the file, `OSError`."""
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def write_atomically(path: Path, content: bytes, *, is_shared: bool = False) -> None:
    """Write `path` atomically: to a temporary name, synced, then renamed. Raises `OSError` that names it.

    With `is_shared` several processes may write the same file at once, each under a temporary name of its own.
    """
    partial = path.with_name(f".{path.name}.{f'{uuid4().hex[:8]}.' if is_shared else ''}partial")
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


def copy_encoding(folder: str | Path) -> None:
    """Add DeepSeek-V4's chat encoding, which `save_pretrained` does not know of, to a drafter's folder: V4 has no chat
    template, so a user of the folder could not make a prompt otherwise."""
    name = "encoding_deepseek_v4.py"
    shutil.copyfile(Path(__file__).parents[1] / name, Path(folder) / name)
