"""The command line: `hyperdflash COMMAND`, also `python -m hyperdflash COMMAND`.

Each command lives in a module of its own, with `add_parser(subparsers)` and a `run(args) -> int`.
"""

import argparse
import sys
from importlib import import_module

from huggingface_hub.errors import StrictDataclassError

from .common.console import UsageError

COMMANDS = {
    "demo": "hyperdflash.generation.demo",
    "generate": "hyperdflash.generation.generate",
    "init": "hyperdflash.training.init",
    "check": "hyperdflash.check.check",
    "benchmark": "hyperdflash.benchmark.benchmark",
    "plot": "hyperdflash.benchmark.plot",
    "features": "hyperdflash.training.features",
    "train": "hyperdflash.training.train",
    "export": "hyperdflash.training.export",
}
DATA_COMMANDS = ("hyperdflash.training.preview", "hyperdflash.training.regenerate")


def main(argv: list[str] | None = None) -> int:
    """Parse and run; returns the exit status: 0, 1 after an error said in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="hyperdflash", description="Lossless speculative decoding for DeepSeek-V4.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    # A command that is asked for is imported alone: some of them take seconds
    wanted = set(argv[:1]) & {*COMMANDS, "data"} or {*COMMANDS, "data"}
    for name in COMMANDS:
        if name in wanted:
            import_module(COMMANDS[name]).add_parser(commands)
    if "data" in wanted:
        text = "look at training data, or have the target write it"
        data = commands.add_parser("data", help=text, description=text, allow_abbrev=False)
        data_commands = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
        for module in DATA_COMMANDS:
            import_module(module).add_parser(data_commands)
    args, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(args, "overrides") and all("=" in r and not r.startswith("-") for r in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no key=value behind an option
        args.overrides += rest
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()  # of loading and saving; our own bars look for a terminal themselves
    try:
        return args.run(args)
    except (ValueError, OSError, ImportError, StrictDataclassError) as error:
        said = error.__cause__ if isinstance(error, StrictDataclassError) else error  # a config's, and what is wrong
        print(f"hyperdflash {args.command}: {said or error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
