"""The target's features from vLLM: what `hyperdflash features RECIPE --vllm` planned, written where it looks for it.

    hyperdflash features recipe.yaml --vllm                                    # plans what is missing
    python -m hyperdflash_vllm.features FEATURES_DIR --model TARGET [options of vllm serve]
    hyperdflash features recipe.yaml --vllm                                    # takes in what was written

FEATURES_DIR has a plan for each split, with the token ids of every sequence. A shard is written whole or not at all,
and one that is there is left as it is, so a run that was stopped goes on with the same command.
"""

import json
import sys
from pathlib import Path

from .checks import FEATURES, check_features_setup

PLAN, FORMAT = "vllm-plan.jsonl", "hyperdflash-vllm-plan-1"
BATCH_TOKENS = 8192
# Options of the engine that are not the user's, and why
TAKEN = {
    "speculative_config": "features come from the target alone",
    "additional_config": "the plan's target is handed on in it",
    "worker_extension_cls": "it is the class that writes the shards",
}


def read_plan(file: Path) -> tuple[dict, list[dict]]:
    """The target's facts, and the shards (`file`, `mark`, `input_ids`). Raises `ValueError` for another file."""
    with file.open(encoding="utf-8") as plan:
        lines = [json.loads(line) for line in plan]
    if not lines or lines[0].get("format") != FORMAT:
        raise ValueError(
            f"{file} is not a plan of this version ({FORMAT}): write it again with `hyperdflash features`"
        )
    return lines[0], lines[1:]


def find_plans(folder: Path) -> list[Path]:
    """The plans of a features folder. Raises `FileNotFoundError` without one."""
    plans = sorted(folder.glob(f"*/{PLAN}"))
    if not plans:
        raise FileNotFoundError(f"{folder} holds no {PLAN}: make it with `hyperdflash features RECIPE --vllm`")
    return plans


def make_batches(rows: list[list[int]], max_tokens: int, max_rows: int) -> list[list[list[int]]]:
    """Consecutive rows, so few that vLLM's scheduler has no reason to cut one."""
    batches = [[]]
    for row in rows:
        if batches[-1] and (sum(map(len, batches[-1])) + len(row) > max_tokens or len(batches[-1]) == max_rows):
            batches.append([])
        batches[-1].append(row)
    return batches


def engine_options(options: dict, target: dict, longest: int) -> dict:
    """What `LLM` is given. Raises `ValueError` for an option that would lose rows."""
    for name, reason in TAKEN.items():
        if options.get(name):
            raise ValueError(f"{name}={options[name]!r} cannot be given, {reason}: leave it out")
    if (replicas := options.get("data_parallel_size") or 1) > 1:
        raise ValueError(
            f"data_parallel_size={replicas} would run each sequence in one replica of many, and one writes: use "
            "tensor_parallel_size"
        )
    batch_tokens = options.get("max_num_batched_tokens") or max(BATCH_TOKENS, longest)
    if batch_tokens < longest:
        raise ValueError(
            f"max_num_batched_tokens={batch_tokens} is less than the longest sequence, {longest} tokens: raise it"
        )
    return {
        **options,
        "max_num_batched_tokens": batch_tokens,
        "max_model_len": max(options.get("max_model_len") or 0, longest + 1),
        "skip_tokenizer_init": True,
        "enforce_eager": True,  # a replayed graph would not hand its rows over
        "enable_prefix_caching": False,
        "worker_extension_cls": "hyperdflash_vllm.capture.FeatureWorker",
        "additional_config": {FEATURES: target},
    }


def write_shards(llm, folder: Path, shards: list[dict], max_tokens: int, max_rows: int) -> None:
    """Run the sequences of each shard and have a worker write it."""
    from tqdm import tqdm
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    for shard in tqdm(shards, desc=f"shards {folder.name}", disable=not sys.stderr.isatty()):
        rows = shard["input_ids"]
        ask_workers(llm, "start_features", rows)
        for batch in make_batches(rows, max_tokens, max_rows):
            llm.generate([{"prompt_token_ids": row} for row in batch], sampling, use_tqdm=False)
        ask_workers(llm, "write_features", str(folder / shard["file"]), shard["mark"], rows)


def ask_workers(llm, name: str, *args) -> None:
    """Raises `ValueError` with what a worker says is wrong."""
    for problem in llm.collective_rpc(name, args=args):
        if problem is not None:
            raise ValueError(problem)


def write_all(folder: Path, options: dict) -> int:
    """Write every planned shard that is not there; returns how many were written. `options` are those of `LLM`.

    Raises `ValueError` for plans of different targets, options that would lose rows, and what `checks` refuses.
    """
    plans = {plan.parent: read_plan(plan) for plan in find_plans(folder)}
    targets = [target for target, _ in plans.values()]
    if any(target != targets[0] for target in targets):
        raise ValueError(f"the plans in {folder} are of different targets: plan again")
    todo = {
        split: [shard for shard in shards if not (split / shard["file"]).exists()]
        for split, (_, shards) in plans.items()
    }
    if not any(todo.values()):
        return 0
    longest = max(len(row) for shards in todo.values() for shard in shards for row in shard["input_ids"])
    options = engine_options(options, targets[0], longest)
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    # Here, too: what the engine's own process refuses is a sentence in its log, and none in the error that comes out
    check_features_setup(EngineArgs(**options).create_engine_config(), targets[0])
    llm = LLM(**options)
    max_rows = llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    for split, shards in todo.items():
        write_shards(llm, split, shards, options["max_num_batched_tokens"], max_rows)
    return sum(map(len, todo.values()))


def main(arguments: list[str] | None = None) -> int:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("features_dir", type=Path, metavar="FEATURES_DIR")
    EngineArgs.add_cli_args(parser)
    options = vars(parser.parse_args(arguments))
    folder = options.pop("features_dir")
    try:
        written = write_all(folder, options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"hyperdflash_vllm.features: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {written} shards written. Take them in with `hyperdflash features RECIPE --vllm`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
