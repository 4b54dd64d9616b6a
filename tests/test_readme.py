"""The commands and the snippet of README and docs: all of them parse, and the README's run (`make nightly`).

A command that is not run here says so behind a `# not run`, or needs a real target, the Hub or vLLM.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_v4 import nightly

from hyperdflash.parsers import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))]


def blocks(page: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    return [text for name, text in found if name == language]


def commands(page: str) -> list[str]:
    """Lines that are typed, continued ones joined, without their comments."""
    lines = "\n".join(blocks(page)).replace("\\\n", " ").split("\n")
    return [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.startswith(" ")]


OURS = [
    (page, line)
    for page in PAGES
    for line in commands(page)
    if "hyperdflash " in line and "hyperdflash_vllm" not in line
]
OURS = [(page, line) for page, line in OURS if re.match(r"(OMP_NUM_THREADS=1 )?(\.venv/bin/)?hyperdflash ", line)]


@pytest.mark.parametrize(("page", "line"), OURS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(OURS)])
def test_a_command_that_is_shown_is_one_that_the_command_line_takes(page, line):
    words = shlex.split(line)
    parse(words[words.index(next(word for word in words if word.endswith("hyperdflash"))) + 1 :])


def test_there_are_commands_and_targets_of_make_that_exist():
    assert len(OURS) > 12
    makefile = (ROOT / "Makefile").read_text()
    shown = {word for page in PAGES for word in re.findall(r"`?make ([a-z-]+)", (ROOT / page).read_text())}
    known = {word for rule in re.findall(r"^([a-z -]+):", makefile, re.M) for word in rule.split()}
    known |= {word for names in re.findall(r"^OF_\w+ := (.*)", makefile, re.M) for word in names.split()}
    ordinary = {"it", "a", "the", "them", "set", "one", "up"}
    assert shown - known - ordinary == set()


@pytest.mark.slow
def test_the_quick_start_prints_a_text_and_its_rounds(tmp_path):
    (snippet,) = blocks("README.md", "python")
    done = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "24*x" in done.stdout
    assert "'acceptance_length'" in done.stdout


@pytest.mark.parametrize("page", [nightly("README.md")])
def test_the_commands_run_one_after_the_other(page, tmp_path):
    """In a copy of the examples, in minutes; not those that need the Hub."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in commands(page):
        if re.match(r"(mkdir|echo|OMP_NUM_THREADS|\.venv)", line) and "deepseek-ai/" not in line:
            line = line.replace(".venv/bin/hyperdflash", f"{sys.executable} -m hyperdflash")
            subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, timeout=900)
    assert (tmp_path / "runs" / "try" / "final" / "README.md").is_file()
    assert (tmp_path / "runs" / "benchmark" / "results.json").is_file()
    assert (tmp_path / "runs" / "trace.html").is_file()
