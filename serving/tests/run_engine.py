"""Engines, each in a process of its own: `python serving/tests/run_engine.py v1` (or v2) in vLLM's environment.

It reads lines of three file names, see `serve`. A job has `target`, `batches` (each a list of prompts, lists of ids),
`max_tokens`, and optionally `speculative_config`, `sampling` (of `SamplingParams`), `watch` (compare what the drafter
gets with the target's residual), `skip_copy` (break vLLM: the residual buffer stays as it is) and `plugins`
(VLLM_PLUGINS). The result has `tokens`, `gaps` (with logprobs=2 in `sampling`), `metrics`, `rounds` (accepted drafts
of each, by prompt) and `watched`, or `error`, the refusal.

A job with `features`, a planned features folder, has its shards written instead, by the plug-in's own command with
`options`; `seen`, a file, gets the ids, positions and residuals of all forwards.
"""

import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import cpu_shim
import torch
from safetensors.torch import save_file

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class Watch:
    """Keeps the residual that hc_head collapses, and compares the drafter's input with it, bit for bit."""

    def __init__(self):
        self.calls, self.equal, self.rows = 0, 0, 0
        from vllm.models.deepseek_v4.cpu.model import DeepseekV4Model

        from hyperdflash_vllm.draft import DFlashHyperDraftModel

        collapse, combine = DeepseekV4Model.forward, DFlashHyperDraftModel.combine_hidden_states
        watch = self

        def forward(model, *args, **kwargs):
            stock = model.hc_head_op.forward

            def keep(hidden_states, *rest):
                watch.residual = hidden_states.flatten(1).clone()
                return stock(hidden_states, *rest)

            model.hc_head_op.forward = keep
            try:
                return collapse(model, *args, **kwargs)
            finally:
                model.hc_head_op.forward = stock

        def combine_hidden_states(model, hidden_states):
            rows = hidden_states.shape[0]
            watch.calls += 1
            watch.rows += rows
            watch.equal += bool((hidden_states == watch.residual[:rows]).all())
            return combine(model, hidden_states)

        DeepseekV4Model.forward, DFlashHyperDraftModel.combine_hidden_states = forward, combine_hidden_states

    def result(self) -> dict:
        return {"calls": self.calls, "equal": self.equal, "rows": self.rows}


def keep_forwards() -> list[tuple]:
    """Ids, positions, and what hc_head collapses, of every forward from now on."""
    from vllm.models.deepseek_v4.cpu.model import DeepseekV4Model

    seen, stock = [], DeepseekV4Model.forward

    def forward(model, input_ids, positions, *args, **kwargs):
        collapse = model.hc_head_op.forward

        def keep(hidden_states, *rest):
            seen.append((input_ids.clone(), positions.clone(), hidden_states.clone()))
            return collapse(hidden_states, *rest)

        model.hc_head_op.forward = keep
        try:
            return stock(model, input_ids, positions, *args, **kwargs)
        finally:
            model.hc_head_op.forward = collapse

    DeepseekV4Model.forward = forward
    return seen


def write_features(job: dict) -> dict:
    from hyperdflash_vllm import features

    seen = keep_forwards()
    status = features.main([job["features"], "--model", job["target"], *job["options"]])
    if status == 0:
        ids, positions, residuals = (torch.cat(parts) for parts in zip(*seen, strict=True))
        save_file({"ids": ids, "positions": positions, "residuals": residuals}, job["seen"])
    return {"status": status, "forwards": len(seen)}


def skip_copy() -> None:
    """The target without the copy into its buffer, which stays allocated."""
    from vllm.models.deepseek_v4.cpu.model import DeepseekV4Model

    stock = DeepseekV4Model.forward

    def forward(model, *args, **kwargs):
        buffer, model._mtp_hidden_buffer = model._mtp_hidden_buffer, None
        try:
            return stock(model, *args, **kwargs)
        finally:
            model._mtp_hidden_buffer = buffer

    DeepseekV4Model.forward = forward


def keep_rounds() -> dict[str, list[int]]:
    """The accepted drafts of every round from now on, by request."""
    from vllm.v1.core.sched.scheduler import Scheduler

    rounds, stock = {}, Scheduler.make_spec_decoding_stats

    def make_spec_decoding_stats(scheduler, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        if num_draft_tokens:
            rounds.setdefault(kwargs["request_id"], []).append(num_accepted_tokens)
        return stock(scheduler, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    Scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    return rounds


def read_metrics(llm) -> dict:
    """vLLM's own counters of drafting; a vector stays a list."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            found[metric.name] = getattr(metric, "values", getattr(metric, "value", None))
    return found


def top_two_gaps(logprobs) -> list[float]:
    """By how much the likeliest token leads, at every position."""
    found = []
    for position in logprobs:
        best, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
        found.append(best - second)
    return found


def generate(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    if job.get("skip_copy"):
        skip_copy()
    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=max(map(len, job["batches"])),
        seed=0,
        disable_log_stats=False,
        **({"speculative_config": job["speculative_config"]} if job.get("speculative_config") else {}),
    )
    # The profiling run has no requests of its own; what is watched are the batches
    watch = Watch() if job.get("watch") else None
    tokens, gaps, rounds = [], [], keep_rounds()
    sampling = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": job["max_tokens"]}
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        outputs = llm.generate(prompts, SamplingParams(**{**sampling, **job.get("sampling", {})}), use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
        gaps += [top_two_gaps(output.outputs[0].logprobs) for output in outputs if output.outputs[0].logprobs]
    in_order = [rounds[name] for name in sorted(rounds, key=lambda name: int(name.split("-")[0]))]
    return {
        "tokens": tokens,
        "gaps": gaps,
        "metrics": read_metrics(llm),
        "rounds": in_order,
        "watched": watch and watch.result(),
    }


def run_job(job_file: str, result_file: str) -> None:
    """Run one job in this process. A refusal is a result; anything else ends it."""
    job = json.loads(Path(job_file).read_text())
    if "plugins" in job:
        os.environ["VLLM_PLUGINS"] = job["plugins"]
    try:
        result = write_features(job) if "features" in job else generate(job)
    except (ValueError, RuntimeError) as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(result_file).write_text(json.dumps(result))


def serve(runner: str) -> None:
    """Import vLLM once; then, for each line of three files on stdin (job, result, log), run a job in a fork.

    A line goes to stdout when it has ended. Nothing that a job changes is seen by the next.
    """
    os.environ.update(SETTINGS)
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
            try:
                run_job(job_file, result_file)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
