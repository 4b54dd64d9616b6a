"""What the commands' parsers share: options, the checks of their values, and help with misspelt words.

Imports nothing that takes time, so that `--help` and a wrong option are answered at once.
"""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ..encoding_deepseek_v4 import EFFORT_INSTRUCTIONS, MODES, check_options
from .console import UsageError

# Not float16: transformers keeps parts of DeepSeek-V4 in fp32, which its forward then multiplies with halves
DTYPES = ("auto", "float32", "bfloat16")

# What HyperDFlashConfig says, which takes seconds to import; tests/test_cli.py holds them together
CONTEXT_SOURCES = ("pre_hc_head", "hidden_layers")
REDUCERS = ("hc_gate", "fc", "mean")
DRAFT_HEADS = ("none", "markov")
# What generation/native.py says: a drafter inside the target's own checkpoint, named in the place of a folder
OWN_DRAFTERS = ("mtp", "dspark")


class HelpFormatter(argparse.HelpFormatter):
    """Shows every default that is a value, e.g. not the None of an option that is simply absent."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        if default is None or default is False or default == [] or default is argparse.SUPPRESS:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {shown.replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and answers a misspelt word with the nearest one.

    Args:
        check: called with the parsed arguments, for what depends on several options; raises `UsageError`.

    What is wrong is raised as a `UsageError`, with the command's name as its `prog`, instead of ending the process.
    """

    def __init__(self, check: Callable[[argparse.Namespace], None] | None = None, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)
        self.check = check
        self.commands: dict[str, Parser] = {}

    def add_commands(self, dest: str):
        """argparse's sub-parsers; the names are kept for suggestions."""
        subparsers = self.add_subparsers(dest=dest, required=True, metavar="COMMAND")
        self.commands = subparsers.choices
        return subparsers

    def parse_known_args(self, args=None, namespace=None):
        # argparse asks for missing options before it says which one is unknown, and the misspelt one is both
        self._check_words(args)
        namespace, rest = super().parse_known_args(args, namespace)
        if self.check is not None:
            try:
                self.check(namespace)
            except UsageError as error:
                self.error(str(error))
        return namespace, rest

    def error(self, message: str):
        message = re.sub(r"^argument (\S+): (must )?", lambda m: f"{m[1]} must " if m[2] else f"{m[1]}: ", message)
        error = UsageError(f"{message} (see {self.prog} --help)")
        error.prog = self.prog
        raise error

    def _check_words(self, words: list[str]) -> None:
        for i, word in enumerate(words):
            if word == "--":
                return
            if self.commands and not word.startswith("-"):
                if word not in self.commands:
                    self.error(f"there is no command {word!r}{did_you_mean(word, self.commands)}")
                return  # what comes behind it is the command's own
            name = word.partition("=")[0]
            # With a space in it, argparse takes it for a value
            if word.startswith("--") and " " not in word and name not in self._option_string_actions:
                self.error(f"there is no option {name}{self._suggestion(word, words[i + 1 :])}")

    def _suggestion(self, word: str, following: list[str]) -> str:
        name, _, value = word.partition("=")
        if close := did_you_mean(name, self._option_string_actions):
            return close
        if any(action.dest == "overrides" for action in self._actions):
            if not value:
                value = following[0] if following and not following[0].startswith("--") else "..."
            return f": keys of the recipe are written {name[2:].replace('-', '_')}={value}"
        return ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`": did you mean ...?"`, or nothing when no known word is near."""
    known = list(known)
    close = [name for name in known if word != "--" and name.startswith(word)]
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""


# --------------------------------------------------------------------------------------------------- values of options


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number that must not be below `least`."""

    def parse(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    parse.__name__ = "int"  # in argparse's "invalid int value: ..."
    return parse


def temperature(text: str) -> float:
    """The type of a temperature: 0 is greedy."""
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 (greedy) or above, got {text}")
    return value


def top_p(text: str) -> float:
    """The type of a share of the probability."""
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


# ----------------------------------------------------------------------------------------- options of several commands


def add_encoding(parser: Parser, *, row_wins: bool = False, default_generation: str | None = "preview") -> None:
    """--mode, --effort and --generation: how messages become a prompt.

    Args:
        row_wins: whether rows of a data file can say their own.
        default_generation: None where it depends on the drafter.
    """
    wins = "; a row's own wins" if row_wins else ""
    parser.add_argument("--mode", choices=MODES, default="non-thinking", help=f"mode of the chat encoding{wins}")
    add_effort(parser, wins, default_generation)


def add_effort(parser: Parser, wins: str = "", default_generation: str | None = "preview") -> None:
    """--effort and --generation, for a command that takes several modes."""
    parser.add_argument("--effort", help=f"reasoning effort, in thinking mode{wins}")
    unless = "" if default_generation else " (default: the drafter's own, else preview)"
    parser.add_argument(
        "--generation",
        choices=tuple(EFFORT_INSTRUCTIONS),
        default=default_generation,
        help=f"generation of the chat encoding{unless}",
    )


def add_device(parser, *, dtype: str | None = "auto") -> None:
    """--dtype, --device-map and --threads: how models are loaded and run. A `dtype` of None leaves no default."""
    text = "dtype of the target and its drafter" + ("" if dtype else " (default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help=text)
    parser.add_argument("--device-map", help="as in transformers, e.g. auto or cuda (default: the CPU)")
    parser.add_argument("--threads", type=at_least(1), help="torch threads on the CPU (default: torch's own choice)")


def add_sampling(parser: Parser, *, max_new_tokens: int) -> None:
    """--max-new-tokens, --temperature, --top-p and --seed."""
    parser.add_argument("--max-new-tokens", type=at_least(1), default=max_new_tokens, help="the longest answer")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=top_p, default=1.0, help="when sampling, the share of probability to keep")
    parser.add_argument("--seed", type=int, default=0, help="random seed for sampling")


def check_effort(args: argparse.Namespace, modes: list[str]) -> None:
    """Raises `UsageError` for an effort that no prompt would have, or that the encoding does not know."""
    if args.effort is None:
        return
    if "thinking" not in modes:
        option = "--modes" if hasattr(args, "modes") else "--mode"
        raise UsageError(f"--effort {args.effort} is for thinking mode: add {option} thinking")
    errors = []
    for generation in [args.generation] if args.generation else EFFORT_INSTRUCTIONS:
        try:
            check_options("thinking", args.effort, generation)
        except ValueError as error:
            errors.append(error)
        else:
            return
    raise UsageError(str(errors[0])) from errors[0]


def check_own_drafter(args: argparse.Namespace) -> None:
    """Raises `UsageError` for a revision of a drafter that is in the target's checkpoint, or a folder of its name."""
    if args.drafter not in OWN_DRAFTERS:
        return
    if Path(args.drafter).is_dir():
        raise UsageError(
            f"{args.drafter} is a drafter in the target's checkpoint: for the folder write ./{args.drafter}"
        )
    if args.drafter_revision is not None:
        raise UsageError(
            f"{args.drafter} is in the target's checkpoint: give --target-revision, not --drafter-revision"
        )


def check_sampling(args: argparse.Namespace) -> None:
    """Raises `UsageError` for options of sampling in greedy decoding, where they do nothing."""
    for name, neutral in (("top_k", 0), ("top_p", 1.0)):
        if args.temperature == 0 and getattr(args, name, neutral) != neutral:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is for sampling: add --temperature 1, or any other above 0")


# -------------------------------------------------------------------------------------------- options of a new drafter

# Fields of HyperDFlashConfig, where they are documented, and their flags in `hyperdflash init`. None is the default of
# all: `init_drafter` tells what was given from what was not
DRAFTER_OPTIONS = {
    "block_size": {"type": at_least(2), "help": "positions of a block, the anchor included (default: 7)"},
    "mask_token_id": {"type": int, "help": "needed unless the vocabulary is V4's 129,280 (default there: 128799)"},
    "context_source": {"choices": CONTEXT_SOURCES, "help": "what is read of the target (default: pre_hc_head)"},
    "target_layer_ids": {
        "type": int,
        "nargs": "+",
        "metavar": "I",
        "help": "for hidden_layers (default: one for each drafter layer, evenly spaced)",
    },
    "reducer": {"choices": REDUCERS, "help": "default: hc_gate wherever it can be inherited, else fc"},
    "reducer_path_norm": {"action": argparse.BooleanOptionalAction, "help": "norm of each path (default: yes)"},
    "draft_head": {"choices": DRAFT_HEADS, "help": "markov is beyond the paper (default: none)"},
    "markov_rank": {"type": at_least(1), "help": "rank of the Markov head (default: 256)"},
    "markov_gate": {"action": "store_true", "help": "the slot's hidden state weighs the bias's parts (default: no)"},
    "draft_confidence": {"action": "store_true", "help": "draft only what is worth verifying (default: no)"},
    "verify_cost": {"type": float, "help": "cost of one more draft, in rounds without drafts (default: 0.03)"},
    "hidden_size": {"type": at_least(1), "help": "width (default: the target's)"},
    "intermediate_size": {"type": at_least(1), "help": "width of the MLP (default: 3 x hidden size)"},
    "num_hidden_layers": {"type": at_least(1), "help": "layers (default: 5 from a width of 1024 on, else 2)"},
    "num_attention_heads": {"type": at_least(1), "help": "default: as many as make up the width"},
    "num_key_value_heads": {
        "type": at_least(1),
        "help": "default: at most a quarter of the heads and 8, a power of two",
    },
    "head_dim": {"type": at_least(1), "help": "default: 128, and less for a width below 1024"},
    "sliding_window": {"type": at_least(1), "help": "positions that a slot can see, itself included (default: 2048)"},
}
