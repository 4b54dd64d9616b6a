"""What every command shares: errors of usage, when progress shows, control characters shown."""

import importlib.util
import os
import sys


class UsageError(ValueError):
    """What was typed, or written in a recipe, cannot be run as it is: exit status 2, as for wrong options."""


def progress_is_hidden() -> bool:
    """Progress bars are for a person at a terminal, and for one process of many."""
    return os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty()


def check_installed(package: str, purpose: str) -> None:
    """Raises `ImportError` with pip's command when an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{purpose} needs {package}: pip install {package}")


def visible(text: str) -> str:
    """The text with visible control characters: `⏎` before each line break, `␉` for a tab, and so on."""
    return "".join(map(_visible_character, text))


def _visible_character(c: str) -> str:
    if c == "\n":
        return "⏎\n"
    if c < " ":
        return chr(0x2400 + ord(c))
    return f"\\x{ord(c):02x}" if "\x7f" <= c < "\xa0" else c
