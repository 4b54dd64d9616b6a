"""The command line: `hyperdflash COMMAND`, also `python -m hyperdflash COMMAND`.

Each command lives in a module of its own, with `add_parser(subparsers)` and a `run(args) -> int`.
"""

import argparse
import sys

from . import demo, generate, init


def main(argv: list[str] | None = None) -> int:
    """Parse and run; returns the exit status: 0, 1 after an error said in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="hyperdflash", description="Lossless speculative decoding for DeepSeek-V4.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (demo, generate, init):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"hyperdflash {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
