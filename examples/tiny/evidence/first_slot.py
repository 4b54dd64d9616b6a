"""How good is the first draft of a round, on text that the target decodes greedily and on text that it samples?

    python examples/tiny/evidence/first_slot.py examples/tiny/build/baselines docs/results/heads/first_slot.json

The first draft follows a true token, with or without a sequential head, so that it does not depend on other drafts.
At every position of the target's continuations of the validation prompts, it compares the target's distribution p at
temperature 1 with the drafter's q, from which drafts may be drawn at other temperatures.
"""

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from hyperdflash.common.checkpoint import load_drafter, load_target
from hyperdflash.common.files import write_atomically
from hyperdflash.generation.mtp import load_mtp
from hyperdflash.generation_hyperdflash import DraftRequest, head_logits
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.arguments import load_recipe
from hyperdflash.training.data import load_recipe_data
from hyperdflash.training.trainer import spaced_prompts

RECIPE = "training/recipes/tiny_headline.yaml"
NEW_TOKENS = 48
DRAFT_TEMPERATURES = (0.8, 1.0, 1.25)
TEXTS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}}


def drafts_of_mtp(mtp, target, ids: torch.LongTensor, residual: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Logits after each anchor `(N, V)`: one forward over the whole text, as it is causal."""
    positions = torch.arange(ids.shape[1] - 1)[None]
    embeds = target.model.embed_tokens(ids[:, 1:])
    hidden, _ = mtp(embeds, residual[:, :-1], input_ids=ids[:, 1:], position_ids=positions, cache=None)
    return head_logits(target, hidden[0, anchors - 1])


def drafts_of_block(drafter, target, ids: torch.LongTensor, residual: torch.Tensor, anchors) -> torch.Tensor:
    """Logits after each anchor `(N, V)`: those of the first draft of a block that starts there."""
    rows, noise_ids = [], drafter.new_noise_ids(ids.device)

    def choose(logits):
        rows.append(logits)
        return logits.argmax(-1)

    for anchor in anchors.tolist():
        noise_ids[0, 0] = ids[0, anchor]
        request = DraftRequest(residual[:, :anchor], ids[:, : anchor + 1], noise_ids, anchor, 1, target, cache=None)
        drafter.propose(request, choose)
    return torch.cat(rows)


@torch.no_grad()
def measure(target, drafters: dict, prompts: list[list[int]], sampling: dict, desc: str) -> dict:
    """Means over the positions of the target's continuations, by drafter."""
    entropies, rows = [], {name: [] for name in drafters}
    for seed, prompt in enumerate(tqdm(prompts, desc=desc)):
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        ids = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **sampling)
        anchors = torch.arange(len(prompt), ids.shape[1] - 1)
        with ResidualTap(target) as tap:
            p = target(ids, use_cache=False).logits[0, anchors].float().softmax(-1)
            residual = tap.take()
        entropies.append(torch.special.entr(p).sum(-1))
        for name, (draft, drafter) in drafters.items():
            logits = draft(drafter, target, ids, residual, anchors)
            same = (p.argmax(-1) == logits.argmax(-1)).float()
            entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
            overlaps = [torch.minimum(p, (logits / t).softmax(-1)).sum(-1) for t in DRAFT_TEMPERATURES]
            rows[name].append(torch.stack([same, entropy, *overlaps]))
    figures = {}
    for name, parts in rows.items():
        same, entropy, *overlaps = torch.cat(parts, dim=1).mean(1).tolist()
        overlaps = dict(zip(map(str, DRAFT_TEMPERATURES), overlaps, strict=True))
        figures[name] = {"same_token": same, "entropy": entropy, "overlap": overlaps}
    return {
        "positions": sum(map(len, entropies)),
        "entropy_of_target": torch.cat(entropies).mean().item(),
        "drafters": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of baselines.py")
    parser.add_argument("output", type=Path)
    parser.add_argument("--num-prompts", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPE)
    target, _ = load_target(recipe.target, None, "float32")
    data, _ = load_recipe_data(recipe, recipe.eval_data, AutoTokenizer.from_pretrained(recipe.target))
    prompts = spaced_prompts(data, args.num_prompts)
    drafters = {
        "mtp:6 (the target": (drafts_of_mtp, load_mtp(recipe.target, target.config)),
        "mtp:6 (mtp": (drafts_of_mtp, load_mtp(args.runs / "mtp-42" / "final", target.config)),
    }
    for name, run in (("hyperdflash:6", "hyperdflash-42"), ("hyperdflash+markov:6", "markov-42")):
        drafter = load_drafter(str(args.runs / run / "final"), None, "float32", target)
        drafters[name] = drafts_of_block, drafter
    found = {text: measure(target, drafters, prompts, sampling, text) for text, sampling in TEXTS.items()}
    write_atomically(args.output, (json.dumps(found, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
