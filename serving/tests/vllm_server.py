"""A real `vllm serve` in a process of its own, for the tests that ask one."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

START = 900  # seconds; a machine that is busy with other things takes minutes
VLLM = [sys.executable, str(Path(__file__).with_name("vllm_cli.py"))]


def serve(arguments: list, log: Path, **settings: str) -> tuple[subprocess.Popen, str]:
    """Start a server and wait until it is healthy; returns it and its address. One that ends or never answers fails
    the test with its last words."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["serve", *arguments, "--host", "127.0.0.1", "--port", port, "--served-model-name", "tiny"]
    env = {**os.environ, **settings}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*VLLM, *map(str, words)], env=env, stdout=file, stderr=file, cwd=log.parent, start_new_session=True
        )
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return process, url
        except OSError:
            time.sleep(0.5)
    stop(process)
    pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-6000:]}")


def stop(process: subprocess.Popen) -> None:
    """End a server, and whatever it started and left behind."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def byte_tokenizer(folder: Path, target: Path) -> None:
    """One token a byte, of the tiny target's vocabulary; vLLM also wants a model's configuration beside it."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    shutil.copy(target / "config.json", folder)
