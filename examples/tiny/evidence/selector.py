"""Would a path selector help? tau if the most likely path of a block is drafted instead of the best token per slot.

    python examples/tiny/evidence/selector.py DRAFTER docs/results/heads/selector.json

The score of a path is the sum of its log-probabilities under the drafter with its Markov head; the best one is found
by dynamic programming over the k tokens of each slot that end the best paths so far. Validation prompts, temperature
0. This search needs no training; a selector trained for acceptance may do better.
"""

import argparse
import json
from pathlib import Path
from types import MethodType

import torch
from transformers import AutoTokenizer

from hyperdflash.common.checkpoint import load_drafter, load_target
from hyperdflash.common.files import write_atomically
from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.generation_hyperdflash import DraftRequest, head_logits
from hyperdflash.training.arguments import load_recipe
from hyperdflash.training.data import load_recipe_data
from hyperdflash.training.trainer import decode_prompts

RECIPE = "training/recipes/tiny_headline.yaml"
CANDIDATES = (2, 4, 8)


def best_path(
    logits: torch.Tensor, hidden: torch.Tensor, anchor: torch.Tensor, head, num_candidates: int
) -> list[int]:
    """The most likely ids of K slots after the anchor `(1,)`: Viterbi over the k best tokens of each slot.

    Args:
        logits: of the slots without the head, `(K, V)`.
        hidden: states of the slots, `(K, D)`.
    """
    previous, score = anchor, torch.zeros(1)
    candidates, came_from = [], []
    for slot_logits, slot_hidden in zip(logits, hidden, strict=True):
        bias = head(previous, slot_hidden.expand(len(previous), -1))
        total, index = (score[:, None] + (slot_logits + bias).log_softmax(-1)).max(0)
        score, previous = total.topk(num_candidates)
        candidates.append(previous)
        came_from.append(index[previous])
    best, path = int(score.argmax()), []
    for ids, index in zip(reversed(candidates), reversed(came_from), strict=True):
        path.append(int(ids[best]))
        best = int(index[best])
    return path[::-1]


def select_paths(drafter, num_candidates: int) -> None:
    """Make the drafter draft best paths; for greedy decoding only."""

    def propose(self, request: DraftRequest, choose) -> None:
        hidden, _ = self.draft_hidden(request)
        logits = head_logits(request.target, hidden)
        path = best_path(logits, hidden, request.noise_ids[0, :1], self.markov_head, num_candidates)
        choose(torch.nn.functional.one_hot(torch.tensor(path), logits.shape[-1]).float())

    drafter.propose = MethodType(propose, drafter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="folder of a drafter with a Markov head")
    parser.add_argument("output", type=Path)
    parser.add_argument("--num-prompts", type=int, default=300)
    args = parser.parse_args()
    if HyperDFlashConfig.from_pretrained(args.drafter).draft_head != "markov":
        parser.error(f"{args.drafter} has no Markov head: give a drafter with draft_head markov")
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPE)
    target, _ = load_target(recipe.target, None, "float32")
    rows, _ = load_recipe_data(recipe, recipe.eval_data, AutoTokenizer.from_pretrained(recipe.target))
    drafter = load_drafter(args.drafter, None, "float32", target)
    drafter.confidence_head = None
    found = {"slot by slot": decode_prompts(drafter, target, rows, args.num_prompts, 64)}
    for k in CANDIDATES:
        select_paths(drafter, k)
        found[f"best path, {k} candidates a slot"] = decode_prompts(drafter, target, rows, args.num_prompts, 64)
    for name, tau in found.items():
        print(f"{name}: tau {tau:.3f}")
    write_atomically(args.output, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
