"""Scripts in processes that have imported torch and transformers, but nothing of ours and no package of the Hub.

Starting Python and importing the libraries takes longer than nearly every script that a test runs so. One server per
process of pytest does it once, isolated (`python -I`), and forks for each script. Where the start itself is what is
tested, use `subprocess`.
"""

import atexit
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# As `python -m hyperdflash` runs it
COMMAND_LINE = "import sys\nfrom hyperdflash.__main__ import main\nraise SystemExit(main(sys.argv[1:]))"

SERVER = """
import json, os, signal, sys, traceback, types
import torch
import transformers.trainer, transformers.dynamic_module_utils
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4

print("ready", flush=True)
for line in sys.stdin:
    children = []
    for script in json.loads(line):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        signal.alarm(300)
        output = os.open(script["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(script["cwd"])
        os.environ.clear()
        os.environ.update(script["environment"])
        sys.argv, sys.path[:0] = script["argv"], script["path"]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        status = 0
        try:
            exec(compile(script["source"], "<string>", "exec"), main.__dict__)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # tearing down gloo's threads rarely aborts a process of a busy machine
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]), flush=True)
"""


def hugging_face(home: Path) -> dict[str, str]:
    return {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@functools.cache
def server() -> tuple[subprocess.Popen, Path]:
    """The server, and the link that it takes for the Hugging Face home: the libraries read that path at import."""
    folder = tempfile.mkdtemp(prefix="fresh-")
    atexit.register(shutil.rmtree, folder)
    home = Path(folder) / "home"
    environment = os.environ | hugging_face(home)
    for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-I", "-c", SERVER]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process, home


def run_together(scripts: list[dict], home: Path) -> list[str]:
    """Run scripts side by side; returns what each printed. Their assertions are the test's.

    `home` becomes their home, with the Hugging Face cache under `home/hf`. A script is `source`, and where it needs
    them `argv`, `cwd`, `path` (put before `sys.path`) and `environment` (added to PATH and HOME).
    """
    process, link = server()
    link.unlink(missing_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home)
    # What Hugging Face's libraries read at import is for processes that a script starts
    basis = {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", **hugging_face(home)}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(i) for i in range(len(scripts))]
        for script, output in zip(scripts, outputs, strict=True):
            script["argv"] = ["-c", *map(str, script.get("argv", []))]
            script["cwd"], script["output"] = str(script.get("cwd", home)), str(output)
            script["path"] = script.get("path", [])
            script["environment"] = basis | script.get("environment", {})
        process.stdin.write(json.dumps(scripts) + "\n")
        process.stdin.flush()
        statuses = json.loads(process.stdout.readline())
        printed = [output.read_text() for output in outputs]
    assert not any(statuses), "\n".join(text[-4000:] for text in printed)
    return printed


def run_fresh(source: str, home: Path, *argv, cwd: Path, path: Sequence[str] = ()) -> str:
    """Run one script; returns what it printed, on both streams. With `path=sys.path` it finds this package."""
    return run_together([{"source": source, "argv": argv, "cwd": cwd, "path": list(path)}], home)[0]


def run_ranks(source: str, home: Path, *argv, **environment: str) -> str:
    """Run a script in two processes of one group, with the environment that `torchrun` makes; returns what the first
    printed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [environment | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    scripts = [{"source": source, "argv": argv, "path": sys.path, "environment": rank} for rank in ranks]
    return run_together(scripts, home)[0]
