"""The options of every command. Imports nothing that takes time: a command's module is imported to run it.

Each `_command(commands)` adds one parser, whose `run` is the module with `run(args) -> int`.
"""

import argparse
from pathlib import Path

from . import __version__
from .common.console import UsageError
from .common.options import (
    DRAFTER_OPTIONS,
    Parser,
    add_device,
    add_effort,
    add_encoding,
    add_sampling,
    at_least,
    check_effort,
    check_own_drafter,
    check_sampling,
    temperature,
)
from .encoding_deepseek_v4 import MODES

# What their modules say, which take seconds to import; tests/test_cli.py holds them together
PUBLIC_SETS = ("gsm8k", "math-500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")
NUM_BUILT_IN_PROMPTS = 6
EXPORT_FORMATS = ("hf", "vllm", "sglang")

TARGET, DRAFTER = "folder or Hub id of a DeepSeek-V4", "folder or Hub id of its drafter"
OWN = "mtp or dspark for the one in the target's checkpoint"


def parse(argv: list[str]) -> argparse.Namespace:
    """The parsed arguments. Raises `UsageError` for what cannot be run; `--help` and `--version` end the process."""
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(args, "overrides") and all("=" in r and not r.startswith("-") for r in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no key=value behind an option
        args.overrides += rest
    return args


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="hyperdflash", description="Lossless speculative decoding for DeepSeek-V4.")
    parser.add_argument("--version", action="version", version=f"hyperdflash {__version__}")
    commands = parser.add_commands("command")
    for add in (_demo, _generate, _init, _check, _benchmark, _plot, _data, _features, _train, _export):
        add(commands)
    return parser


def _demo(commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="run the tiny target with and without its drafter",
        description="Three prompts, greedily, with and without the drafter. A tiny stand-in: its speed and acceptance "
        "are not comparable with published figures.",
    )
    parser.add_argument("--target", help=f"{TARGET} (default: the tiny one that comes with the package)")
    parser.add_argument("--drafter", help=f"{DRAFTER} (default: the tiny target's)")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=128, help="the longest answer")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="timed runs of each kind, interleaved")
    parser.set_defaults(run="generation.demo")


def _generate(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text with a target and its drafter",
        description="Generate text from a prompt or chat. Greedy unless --temperature is above 0.",
        check=_check_generate,
    )
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    parser.add_argument(
        "drafter", metavar="DRAFTER", nargs="?", help=f"{DRAFTER}, or {OWN}; without one, plain decoding"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="one user message")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="a text file with one user message")
    source.add_argument(
        "--chat-file", type=Path, metavar="FILE", help='JSON: a list of {"role", "content"}, or {"messages": [...]}'
    )
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat encoding")
    add_encoding(parser)
    add_sampling(parser, max_new_tokens=256)
    parser.add_argument("--top-k", type=at_least(0), default=0, help="when sampling, the tokens to keep; 0 keeps all")
    parser.add_argument(
        "--num-assistant-tokens", type=at_least(1), metavar="N", help="drafts per round (default: the drafter's block)"
    )
    parser.add_argument(
        "--show-drafts", action="store_true", help="colour accepted, own and rejected tokens (in a terminal)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="OUT.html", help="write a page that shows what became of every draft, and why"
    )
    add_device(parser)
    parser.add_argument("--target-revision", help="branch, tag or commit of the target's Hub id")
    parser.add_argument("--drafter-revision", help="branch, tag or commit of the drafter's Hub id")
    parser.set_defaults(run="generation.generate")


def _check_generate(args: argparse.Namespace) -> None:
    if args.drafter is None:
        for name in ("show_drafts", "trace", "num_assistant_tokens", "drafter_revision"):
            if getattr(args, name):
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} needs a drafter: hyperdflash generate TARGET DRAFTER ...")
    if args.prompt is not None and not args.prompt.strip():
        raise UsageError("the prompt is empty")
    if args.raw and (args.mode, args.effort, args.generation) != ("non-thinking", None, "preview"):
        raise UsageError("--mode, --effort and --generation belong to the chat encoding, which --raw leaves out")
    if args.trace is not None and not args.trace.is_dir() and args.trace.suffix not in (".html", ".htm"):
        raise UsageError(f"--trace writes an HTML page: name a file that ends in .html, not {args.trace}")
    check_own_drafter(args)
    check_effort(args, [args.mode])
    check_sampling(args)


def _init(commands) -> None:
    parser = commands.add_parser(
        "init",
        help="make a drafter for a DeepSeek-V4 checkpoint",
        description="Make a drafter folder for a DeepSeek-V4 checkpoint. Only its config, hc_head, norm and four "
        "embedding rows are read.",
    )
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    parser.add_argument("output", metavar="OUT", help="folder to make; must not exist or be empty")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id (default: main)")
    for name, flag in DRAFTER_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, **flag)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the new weights")
    parser.set_defaults(run="training.init")


def _check(commands) -> None:
    parser = commands.add_parser(
        "check",
        help="find out why a drafter accepts little",
        description="Go through the known causes of a drafter that accepts little or nothing, mostly by experiment on "
        "texts that the target writes. Exit status 3 when a cause was found.",
        check=_check_check,
    )
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    parser.add_argument("drafter", metavar="DRAFTER", help=f"{DRAFTER}, or {OWN}")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="data file whose rows have a prompt, turns or messages, e.g. .jsonl, .jsonl.gz or .parquet (default: "
        "built-in prompts); answers in it are judged as well as the target's own",
    )
    parser.add_argument(
        "--num-prompts", type=at_least(1), default=NUM_BUILT_IN_PROMPTS, help="how many prompts to use, from the start"
    )
    parser.add_argument(
        "--max-new-tokens", type=at_least(1), default=64, help="the longest answer that the target writes to a prompt"
    )
    add_encoding(parser, default_generation=None)
    add_device(parser)
    parser.add_argument("--target-revision", help="branch, tag or commit of the target's Hub id")
    parser.add_argument("--drafter-revision", help="branch, tag or commit of the drafter's Hub id")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run="check.check")


def _check_check(args: argparse.Namespace) -> None:
    check_own_drafter(args)
    check_effort(args, [args.mode])


def _benchmark(commands) -> None:
    parser = commands.add_parser(
        "benchmark",
        help="measure acceptance length and speed-up of several methods",
        description="Measure acceptance length and speed-up of several methods on the same prompts. Run the same "
        "command again to resume after a stop.",
        check=lambda args: check_effort(args, args.modes),
    )
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        metavar="METHOD",
        help="name:N[=CHECKPOINT[,CHECKPOINT...]], N drafts per round: target-only (always measured), "
        "prompt-lookup:N, mtp:N and dspark:N (the target's own module, or a checkpoint's), hyperdflash:N=, "
        "dflash:N=, mean:N=, fc:N=, and with heads hyperdflash+markov:N=, hyperdflash+markov+confidence:N=, "
        "mean+markov:N=, dspark-like:N=. Checkpoints are folders or Hub ids (id@revision); several are one method "
        "trained with several seeds",
    )
    parser.add_argument(
        "--datasets",
        nargs="+",
        default=[],
        metavar="SET",
        help=f"public sets from the Hub, or SET@revision: {', '.join(PUBLIC_SETS)}",
    )
    parser.add_argument("--prompts", nargs="+", type=Path, default=[], metavar="FILE", help="data files of prompts")
    parser.add_argument(
        "--num-prompts",
        type=at_least(1),
        help="how many prompts of each set to use, after a seeded shuffle (default: all)",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["non-thinking"], help="modes of the chat encoding"
    )
    add_effort(parser)
    parser.add_argument("--temperatures", nargs="+", type=temperature, default=[0.0], metavar="T", help="0 is greedy")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], metavar="S", help="random seeds for sampling; greedy needs none"
    )
    parser.add_argument("--max-new-tokens", type=at_least(1), default=256, help="the longest answer")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for records and results")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also write trace.html: every round of every method on the first prompt of each set, decoded once more",
    )
    add_device(parser)
    parser.add_argument("--target-revision", help="branch, tag or commit of the target's Hub id")
    parser.set_defaults(run="benchmark.benchmark")


def _plot(commands) -> None:
    parser = commands.add_parser(
        "plot",
        help="make table and pictures of benchmark results again",
        description="Make table.md, acceptance.png and speedup.png from the results.json of one or more benchmarks.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="output of `hyperdflash benchmark`")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for table and pictures")
    parser.set_defaults(run="benchmark.plot")


def _data(commands) -> None:
    text = "look at training data, or regenerate its answers"
    data = commands.add_parser("data", help=text, description=text).add_commands("data_command")
    _preview(data)
    _regenerate(data)


def _preview(commands) -> None:
    parser = commands.add_parser(
        "preview",
        help="show which tokens of a data file are learned",
        description="Show the first rows of a data file as training will see them, token by token.",
        check=lambda args: check_effort(args, ["thinking"]),  # a row can be
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="data file, glob, or Hub data set")
    parser.add_argument("--tokenizer", required=True, help="folder or Hub id of the target")
    add_encoding(parser, row_wins=True)
    parser.add_argument("--max-length", type=at_least(3), default=3072, help="tokens of a row; longer ones are cut")
    parser.add_argument("--num-samples", type=at_least(1), default=3, help="how many rows to show")
    parser.set_defaults(run="training.preview")


_TARGET_OPTIONS = ("target_revision", "dtype", "device_map", "batch_size", "threads")
_SERVER_OPTIONS = ("model", "concurrency", "retries", "timeout", "api_key_env")


def _regenerate(commands) -> None:
    parser = commands.add_parser(
        "regenerate",
        help="regenerate the answers of a data set with the target",
        description="Regenerate the answers of a data set with the target. Run the same command again to resume.",
        check=_check_regenerate,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="data files, globs, or Hub data sets")
    parser.add_argument("--output", type=Path, required=True, metavar="OUT.jsonl", help="file for the answers")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--target", help=f"{TARGET}, to be run here")
    source.add_argument("--server", metavar="URL", help="OpenAI-compatible server, e.g. vLLM's http://localhost:8000")
    parser.add_argument("--tokenizer", help="folder or Hub id (default: the target's)")
    add_encoding(parser, row_wins=True)
    add_sampling(parser, max_new_tokens=2048)
    parser.add_argument("--max-samples", type=at_least(1), help="answer so many rows, drawn by --seed (default: all)")
    parser.add_argument("--skip-bad-rows", action="store_true", help="count them as failed instead of stopping")
    here = parser.add_argument_group("with --target")
    here.add_argument("--target-revision", help="branch, tag or commit of the target's Hub id")
    add_device(here, dtype=None)
    here.add_argument("--batch-size", type=at_least(1), help="rows decoded together (default: 32)")
    there = parser.add_argument_group("with --server")
    there.add_argument("--model", help="the name that the server has for the target")
    there.add_argument("--concurrency", type=at_least(1), help="requests at the same time (default: 32)")
    there.add_argument("--retries", type=at_least(0), help="retries of a failed request (default: 5)")
    there.add_argument("--timeout", type=float, help="seconds to wait for an answer (default: 600)")
    there.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the server's key")
    parser.set_defaults(run="training.regenerate")


def _check_regenerate(args: argparse.Namespace) -> None:
    for name in _TARGET_OPTIONS if args.server else _SERVER_OPTIONS:
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} needs {'--target' if args.server else '--server'}")
    if args.server and not (args.model and args.tokenizer):
        raise UsageError("--server needs --model, its name there, and --tokenizer, a folder or Hub id")
    check_effort(args, ["thinking"])  # a row can be
    check_sampling(args)


def _features(commands) -> None:
    parser = commands.add_parser(
        "features",
        help="store the target's features of a recipe's data",
        description="Run the target once over the data of a recipe, here or in vLLM (`features: server`), and store "
        "its residuals in features_dir. Run the same command again to resume.",
    )
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="as for `hyperdflash train`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="win over the file")
    parser.add_argument("--verify", action="store_true", help="write nothing; read and check all that is stored")
    parser.set_defaults(run="training.features")


def _train(commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a drafter from a recipe",
        description="Train a drafter as a recipe says. Keys are the fields of transformers' TrainingArguments and "
        "those of docs/training.md (training/arguments.py).",
    )
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="flat YAML file of keys")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="win over the file")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, run one step, write nothing")
    parser.add_argument("--profile", action="store_true", help="print where the time went")
    parser.set_defaults(run="training.train")


def _export(commands) -> None:
    parser = commands.add_parser(
        "export",
        help="make a Hub folder from a checkpoint",
        description="Make a self-contained Hub folder, with a model card, from a run's best checkpoint or another.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's, a checkpoint's or a drafter's folder")
    parser.add_argument("output", metavar="OUT", help="folder to make; must not exist or be empty")
    parser.add_argument(
        "--format",
        choices=EXPORT_FORMATS,
        default="hf",
        help="hf: transformers, the Hub; vllm, sglang: for the plug-in of that engine",
    )
    parser.set_defaults(run="training.export")
