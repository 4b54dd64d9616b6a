"""Engines, each in a process of its own: `python serving/tests/run_engine.py v1` (or v2), as `conftest.py` starts it.

It reads lines of three file names, see `serve`. A job has `target`, `batches` (each a list of prompts, lists of ids),
`max_tokens`, and optionally `speculative_config`, `options` (of `LLM`), `sampling` (of `SamplingParams`), `caching`
(of prefixes, see the shim), `pages` (of the draft, in positions), `watch` (compare what the drafter gets with the
target's residual), `broken` (a key of `BROKEN`), `architecture` (the target goes by that name, of a model that vLLM
has on other platforms only) and `plugins` (VLLM_PLUGINS). The result has `tokens`, `top_two` (with logprobs=2 in
`sampling`), `metrics`, `rounds` and `drafts` (of each round of each prompt: how many drafts were accepted, and which
were proposed) and `watched`, or `error`, the refusal, with `started`, whether the engine was there before it. A file
`seen` gets the ids, positions and residuals of all forwards; the result comes once as many files of features are in
`written`, a folder, as prompts.

A target in a folder `standin` is served by `standin.py`, also in workers, processes that import this file anew.
"""

import json
import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import cpu_shim
import standin
import torch
from safetensors.torch import save_file

JOB_SECONDS = 900
STANDIN = "HYPERDFLASH_TESTS_STANDIN"

if os.environ.get(STANDIN):
    standin.install()


def tap_residual(keep) -> None:
    """`keep(input_ids, positions, residual)` in every forward from now on; the residual is what hc_head collapses."""
    from vllm.models.deepseek_v4.cpu.model import DeepseekV4Model

    stock = DeepseekV4Model.forward

    def forward(model, input_ids, positions, *args, **kwargs):
        collapse = model.hc_head_op.forward

        def tapped(hidden_states, *rest):
            keep(input_ids.clone(), positions.clone(), hidden_states.clone())
            return collapse(hidden_states, *rest)

        model.hc_head_op.forward = tapped
        try:
            return stock(model, input_ids, positions, *args, **kwargs)
        finally:
            model.hc_head_op.forward = collapse

    DeepseekV4Model.forward = forward


def watch_drafter() -> dict[str, int]:
    """From now on: calls of the drafter's reducer, and how many got the last residual bit for bit."""
    from hyperdflash_vllm.draft import DFlashHyperDraftModel

    watched, last, combine = {"calls": 0, "equal": 0}, {}, DFlashHyperDraftModel.combine_hidden_states

    def combine_hidden_states(model, hidden_states):
        watched["calls"] += 1
        watched["equal"] += torch.equal(hidden_states, last["residual"][: len(hidden_states)].flatten(1))
        return combine(model, hidden_states)

    tap_residual(lambda ids, positions, residual: last.update(residual=residual))
    DFlashHyperDraftModel.combine_hidden_states = combine_hidden_states
    return watched


def keep_forwards() -> list[tuple]:
    """The ids, positions and residuals of every forward from now on."""
    seen = []
    tap_residual(lambda *forward: seen.append(forward))
    return seen


def save_forwards(seen: list[tuple], job: dict) -> None:
    """Write them, and wait for what the plug-in writes in threads."""
    ids, positions, residuals = (torch.cat(parts) for parts in zip(*seen, strict=True))
    save_file({"ids": ids, "positions": positions, "residuals": residuals}, job["seen"])
    number = len({tuple(prompt) for batch in job["batches"] for prompt in batch})
    while len(list(Path(job["written"]).rglob("*.safetensors"))) < number:
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------- vLLM as it might become


def skip_copy() -> None:
    """Nothing is copied into the target's buffer, which stays allocated."""
    from vllm.models.deepseek_v4.cpu.model import DeepseekV4Model

    stock = DeepseekV4Model.forward

    def forward(model, *args, **kwargs):
        buffer, model._mtp_hidden_buffer = model._mtp_hidden_buffer, None
        try:
            return stock(model, *args, **kwargs)
        finally:
            model._mtp_hidden_buffer = buffer

    DeepseekV4Model.forward = forward


def change_buffer(change) -> None:
    """The target is made with another buffer."""
    from vllm.models.deepseek_v4.cpu.model import DeepseekV4Model

    stock = DeepseekV4Model.__init__

    def __init__(model, **kwargs):
        stock(model, **kwargs)
        model._mtp_hidden_buffer = change(model._mtp_hidden_buffer)

    DeepseekV4Model.__init__ = __init__


def pass_window() -> None:
    """The target's window reaches the draft's layers."""
    from hyperdflash_vllm import draft

    draft.without_target_window = nullcontext


def serve_stock_target(name: str = "DeepseekV4ForCausalLM") -> None:
    """vLLM's own class has the last word on the target, under this name."""
    from vllm import ModelRegistry
    from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    ModelRegistry.register_model(name, DeepseekV4ForCausalLM)


BROKEN = {
    "skipped copy": skip_copy,
    "no buffer": lambda: change_buffer(lambda buffer: None),
    "narrow buffer": lambda: change_buffer(lambda buffer: buffer[:, : buffer.shape[1] // 2]),
    "passed window": pass_window,
    "stock target": serve_stock_target,
}


# ------------------------------------------------------------------------------------------------------------- engines


def keep_rounds() -> tuple[dict[str, list], dict[str, list]]:
    """Of every round from now on, by request: how many drafts were accepted, and the drafts."""
    from vllm.v1.core.sched.scheduler import Scheduler

    rounds, drafts = {}, {}
    stock, update = Scheduler.make_spec_decoding_stats, Scheduler.update_from_output

    def make_spec_decoding_stats(scheduler, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        if num_draft_tokens:
            rounds.setdefault(kwargs["request_id"], []).append(num_accepted_tokens)
        return stock(scheduler, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    def update_from_output(scheduler, scheduler_output, model_runner_output):
        for request, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            drafts.setdefault(request, []).append(list(tokens))
        return update(scheduler, scheduler_output, model_runner_output)

    Scheduler.make_spec_decoding_stats, Scheduler.update_from_output = make_spec_decoding_stats, update_from_output
    return rounds, drafts


def read_metrics(llm) -> dict:
    """vLLM's own counters of drafting, the prefix cache and preemptions; a vector stays a list."""
    found = {}
    for metric in llm.get_metrics():
        if any(word in metric.name for word in ("spec_decode", "prefix_cache", "preemptions")):
            found[metric.name] = getattr(metric, "values", getattr(metric, "value", None))
    return found


def top_two(logprobs) -> list[tuple[list[int], float]]:
    """At every position, the two likeliest tokens and by how much the first one leads."""
    found = []
    for position in logprobs:
        best, second = sorted(position, key=lambda token: position[token].logprob, reverse=True)[:2]
        found.append(([best, second], position[best].logprob - position[second].logprob))
    return found


def serve_pages(size: int) -> None:
    """The draft's layers have pages of this size, in the layout that DeepSeek-V4 has on a GPU: others scale them."""
    from hyperdflash_vllm.memory import DraftPages

    os.environ["VLLM_KV_CACHE_LAYOUT"] = "BLHNC"
    cpu_shim.block_outermost_layout()
    DraftPages.best_size = lambda pages, vllm_config: size


def generate(job: dict, progress: dict) -> dict:
    """Run the batches; `progress` is told once the engine is there."""
    from vllm import LLM, SamplingParams

    options = {"speculative_config": job["speculative_config"]} if "speculative_config" in job else {}
    if job.get("caching"):
        cpu_shim.prefix_caching()
    if "broken" in job:
        BROKEN[job["broken"]]()
    if "pages" in job:
        serve_pages(job["pages"])
    if Path(job["target"]).parent.name == "standin":
        os.environ[STANDIN] = "1"
        standin.install()
    if "architecture" in job:
        serve_stock_target(job["architecture"])
        options["hf_overrides"] = {"architectures": [job["architecture"]]}
    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=max(map(len, job["batches"])),
        seed=0,
        disable_log_stats=False,
        **{"max_model_len": 512, "max_num_batched_tokens": 512, **options, **job.get("options", {})},
    )
    progress["started"] = True
    # What is watched are the batches, and no forward before them
    watched = watch_drafter() if job.get("watch") else None
    seen = keep_forwards() if "seen" in job else []
    tokens, leads, (rounds, drafts) = [], [], keep_rounds()
    sampling = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": job["max_tokens"]}
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        outputs = llm.generate(prompts, SamplingParams(**{**sampling, **job.get("sampling", {})}), use_tqdm=False)
        tokens.append([list(one.token_ids) for output in outputs for one in output.outputs])
        leads += [top_two(output.outputs[0].logprobs) for output in outputs if output.outputs[0].logprobs]
    if "seen" in job:
        save_forwards(seen, job)
    in_order = sorted(rounds, key=lambda name: int(name.split("-")[0]))
    return {
        "tokens": tokens,
        "top_two": leads,
        "metrics": read_metrics(llm),
        "rounds": [rounds[name] for name in in_order],
        "drafts": [drafts[name] for name in in_order],
        "watched": watched,
        "forwards": len(seen),
    }


def run_job(job_file: str, result_file: str) -> None:
    """Run one job in this process. A refusal is a result, also one of a worker, which arrives as a plain error."""
    job = json.loads(Path(job_file).read_text())
    if "plugins" in job:
        os.environ["VLLM_PLUGINS"] = job["plugins"]
    progress = {"started": False}
    try:
        result = generate(job, progress)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}", **progress}
    Path(result_file).write_text(json.dumps(result))


def serve(runner: str) -> None:
    """Import vLLM once; then, for each line of three files on stdin (job, result, log), run a job in a fork.

    A line goes to stdout when it has ended. Nothing that a job changes is seen by the next.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    if runner == "v2":
        cpu_shim.triton_interpreter()
    cpu_shim.apply(interpreter=runner == "v2")
    import vllm.model_executor.models.qwen3_dflash
    import vllm.models.deepseek_v4
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    for line in sys.stdin:
        job_file, result_file, log_file = line.split()
        if (pid := os.fork()) == 0:
            log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            signal.alarm(JOB_SECONDS)  # ends a job that hangs
            try:
                run_job(job_file, result_file)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            with Path(log_file).open("a") as log:
                log.write(f"\nthe job ended with {code} (-{signal.SIGALRM}: it ran for {JOB_SECONDS} s)\n")
        print("ended", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
