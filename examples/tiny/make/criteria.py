"""How much the tiny target's paths differ, and how sure it is of its words, on validation prompts.

    python examples/tiny/make/criteria.py examples/tiny/build/pretrained  # minutes; prints what post_train.py writes

`LIMITS` were fixed before any target was trained for them; `measure` says how far a target came. Everything is
measured on text that the target writes itself, in answer to `build/prompts/valid-{code,math,chat}.jsonl`:

- `energy_outside_mean`, `cosine_of_collapse_and_mean`: of the residual before `hc_head`, at every position.
- `entropy`: nats per token of answers sampled at temperature 1.
- `repeated`: share of 4-grams that stood in the same greedy answer before; `ended`: share of greedy answers that end
  within the domain's limit; `distinct`: share of different ones among them, which falls where the target gives every
  prompt one answer. `of_training_text` has the same of the answers that the prompts had, cut at that limit.
"""

import argparse
import json
from operator import ge, le
from pathlib import Path

import torch
from batching import DOMAINS
from speed import fast_hyper_connections
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer

from hyperdflash import encode_with_mask
from hyperdflash.common.checkpoint import load_target
from hyperdflash.training.writers import Sampling, Turn, write_batch

TINY = Path(__file__).resolve().parents[1]
NEW_TOKENS = {"code": 192, "math": 128, "chat": 64}
OPERATORS = {">=": ge, "<=": le}
LIMITS = {
    "energy_outside_mean": (">=", 0.25),
    "cosine_of_collapse_and_mean": ("<=", 0.92),
    "entropy_mean": ("<=", 0.6),
    "entropy_worst": ("<=", 0.9),
}


def read_turns(file: Path, tokenizer) -> tuple[list[Turn], list[list[int]]]:
    """The last turn of every conversation, and the ids of the answer that it has there."""
    turns, answers = [], []
    for i, line in enumerate(file.open(encoding="utf-8")):
        messages = json.loads(line)["messages"]
        ids, _ = encode_with_mask(messages[:-1], tokenizer, add_generation_prompt=True)
        whole, _ = encode_with_mask(messages, tokenizer)
        turns.append(Turn(f"{file.name}:{i + 1}", 1, messages, len(messages) - 1, {}, ids, seed=i))
        answers.append(whole[len(ids) :])
    return turns, answers


def repeated(ids: list[int]) -> float:
    """Share of 4-grams that stood in `ids` before; 0 for fewer than four tokens."""
    grams = list(zip(*(ids[i:] for i in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(answers: list[list[int]]) -> float:
    """Share of different answers."""
    return len(set(map(tuple, answers))) / len(answers)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def write(target, turns: list[Turn], sampling: Sampling) -> list[tuple[list[int], bool]]:
    """The target's answers, in the order of the turns: ids, and whether they ended by themselves."""
    eos = {target.config.eos_token_id}
    answers = {i: (ids, reason == "stop") for i, ids, reason in write_batch(target, turns, sampling, eos)}
    return [answers[i] for i in range(len(turns))]


@torch.no_grad()
def look(target, prompt: list[int], answer: list[int]) -> dict[str, torch.Tensor]:
    """Entropy at every token of the answer; per position of the text the energy of the residual, what of it lies
    outside the paths' mean, and the cosine of the gate's collapse and that mean."""
    seen = []
    handle = target.model.hc_head.register_forward_hook(lambda _, args, out: seen.append((args[0][0], out[0])))
    try:
        logits = target(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    finally:
        handle.remove()
    ((H_TmD, collapse),) = seen
    middle = H_TmD.mean(1)
    logp = logits.float().log_softmax(-1)
    return {
        "entropy": -(logp.exp() * logp).sum(-1),
        "energy": H_TmD.square().sum((1, 2)),
        "outside": (H_TmD - middle.unsqueeze(1)).square().sum((1, 2)),
        "cosine": cosine_similarity(collapse, middle, dim=-1),
    }


def measure_domain(target, tokenizer, prompts: Path, domain: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """One domain's part of the report, and the values of `look` on its sampled answers."""
    turns, originals = read_turns(prompts / f"valid-{domain}.jsonl", tokenizer)
    limit = NEW_TOKENS[domain]
    greedy = write(target, turns, Sampling(limit))
    sampled = write(target, turns, Sampling(limit, temperature=1.0))
    looks = [look(target, turn.prompt_ids, ids) for turn, (ids, _) in zip(turns, sampled, strict=True) if ids]
    values = {name: torch.cat([one[name] for one in looks]) for name in looks[0]}
    report = {
        "entropy": values["entropy"].mean().item(),
        "repeated": mean(repeated(ids) for ids, _ in greedy),
        "repeated_sampled": mean(repeated(ids) for ids, _ in sampled),
        "ended": mean(ended for _, ended in greedy),
        "distinct": distinct([ids for ids, _ in greedy]),
        "tokens": mean(len(ids) for ids, _ in greedy),
        "of_training_text": {
            "repeated": mean(repeated(ids[:limit]) for ids in originals),
            "ended": mean(len(ids) <= limit for ids in originals),
            "distinct": distinct([ids[:limit] for ids in originals]),
            "tokens": mean(len(ids[:limit]) for ids in originals),
        },
    }
    return report, values


def measure(folder: Path, prompts: Path) -> dict:
    """The report of the target in `folder`: figures, and `met`, whether each of `LIMITS` holds."""
    target, _ = load_target(str(folder), None, "float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    domains, values = {}, []
    for domain in DOMAINS:
        domains[domain], value = measure_domain(target, tokenizer, prompts, domain)
        values.append(value)
    entropies = [domains[domain]["entropy"] for domain in DOMAINS]
    every = {name: torch.cat([value[name] for value in values]) for name in values[0]}
    report = {
        "energy_outside_mean": (every["outside"].sum() / every["energy"].sum()).item(),
        "cosine_of_collapse_and_mean": every["cosine"].mean().item(),
        "entropy_mean": mean(entropies),
        "entropy_worst": max(entropies),
    }
    met = {name: OPERATORS[sign](report[name], limit) for name, (sign, limit) in LIMITS.items()}
    report |= {"domains": domains, "limits": {name: f"{sign} {limit}" for name, (sign, limit) in LIMITS.items()}}
    return json.loads(json.dumps(report | {"met": met}), parse_float=lambda x: round(float(x), 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--build", type=Path, default=TINY / "build")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fast_hyper_connections()
    print(json.dumps(measure(args.target, args.build / "prompts"), indent=1))


if __name__ == "__main__":
    main()
