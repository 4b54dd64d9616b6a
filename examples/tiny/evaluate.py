"""Greedy decoding of held-out prompts with and without the drafter, interleaved: tau, speed-up, and equality of ids.

    python examples/tiny/evaluate.py                # needs build/heldout-*.npz (corpus.py, tokenizer.py: two minutes)

Writes `evaluation.json` into the drafter's folder. A tiny stand-in: not comparable with published figures.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from data import DOMAINS, MAX_NEW_TOKENS, make_prompts
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hyperdflash.generation.metrics import first_difference, timed_greedy
from hyperdflash.generation_hyperdflash import SpeculativeStats
from hyperdflash.modeling_hyperdflash import HyperDFlashModel

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--drafter", type=Path, default=HERE / "drafter")
    parser.add_argument("--prompts", type=int, default=30, help="of every domain")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    drafter = HyperDFlashModel.from_pretrained(args.drafter, dtype=torch.float32).eval()
    prompts = make_prompts(args.build, "heldout", AutoTokenizer.from_pretrained(args.target), args.prompts)
    report, differences = {}, []
    timed_greedy(target, torch.tensor([prompts[0][1]]), 16, drafter)
    for domain in DOMAINS:
        stats, plain_s, drafted_s, num_tokens = SpeculativeStats(), 0.0, 0.0, 0
        for ids in tqdm([ids for d, ids in prompts if d == domain], desc=domain):
            prompt = torch.tensor(ids)[None]
            plain, seconds = timed_greedy(target, prompt, MAX_NEW_TOKENS[domain])
            plain_s += seconds
            drafted, seconds = timed_greedy(target, prompt, MAX_NEW_TOKENS[domain], drafter)
            drafted_s += seconds
            num_tokens += plain.sequences.shape[1] - prompt.shape[1]
            stats.extend(drafted.speculation)
            if (difference := first_difference(target, plain.sequences, drafted.sequences)) is not None:
                position, gap = difference
                gap = gap if math.isfinite(gap) else None  # JSON knows no infinity
                differences.append({"domain": domain, "position": position, "gap": gap})
        report[domain] = {
            "num_new_tokens": num_tokens,
            "tokens_per_second": num_tokens / drafted_s,
            "speedup": plain_s / drafted_s,
            **stats.to_dict(),
        }
    for key in ("acceptance_length", "speedup"):
        report[f"mean_{key}"] = sum(report[domain][key] for domain in DOMAINS) / len(DOMAINS)
    report |= {"differences": differences, "prompts_a_domain": args.prompts}
    text = json.dumps(json.loads(json.dumps(report), parse_float=lambda x: round(float(x), 4)), indent=2)
    (args.drafter / "evaluation.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
