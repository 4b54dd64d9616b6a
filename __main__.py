"""The command line: `hyperdflash COMMAND`, also `python -m hyperdflash COMMAND`.

`parsers.py` has the options. Each command is run by `run(args) -> int` of a module of its own.
"""

import sys
from importlib import import_module

from .common.console import UsageError
from .parsers import parse


def main(argv: list[str] | None = None) -> int:
    """Parse and run; returns the exit status.

    0; 1 after an error, said in one line; 2 when what was typed cannot be run; 130 after Ctrl-C. `check` has 3 of its
    own. `--help` and `--version` raise `SystemExit`.
    """
    name = "hyperdflash"
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        name = " ".join(filter(None, (name, args.command, getattr(args, "data_command", None))))
        # Torch and transformers are imported from here on, inside the `try`: Ctrl-C during it is not a traceback
        return _run(args)
    except UsageError as error:
        print(f"{getattr(error, 'prog', name)}: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(args) -> int:
    from huggingface_hub.errors import StrictDataclassError

    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()  # of loading and saving; our own bars look for a terminal themselves
    try:
        return import_module(f".{args.run}", __package__).run(args)
    except StrictDataclassError as error:  # says which field; its cause says what is wrong with it
        raise ValueError(str(error.__cause__ or error)) from error


if __name__ == "__main__":
    raise SystemExit(main())
