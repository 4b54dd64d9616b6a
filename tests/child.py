"""Functions run in a child of the test's process: its imports are there already, and it can be killed."""

import os
import time
import traceback
from pathlib import Path


def fork(function) -> int:
    """Run `function` in a child; returns its pid. Its status is the function's value, 99 after an exception."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def wait_for_lines(path: Path, number: int, pid: int) -> None:
    """Until a file has so many whole lines. Fails where the child that writes them ends before."""
    deadline = time.monotonic() + 120
    while not path.is_file() or path.read_bytes().count(b"\n") < number:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), f"ended before line {number} of {path}"
        assert time.monotonic() < deadline, f"no line {number} in {path}"
        time.sleep(0.005)
