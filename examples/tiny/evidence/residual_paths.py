"""How much the residual paths of the tiny target differ on its validation texts: docs/results/paths.json.

    python examples/tiny/evidence/residual_paths.py

A gate can only help if the paths differ. The file has the cosine between every two paths, the share of their energy
outside their mean, the weights that the target's gate gives them (mean and standard deviation over positions), and
the cosine between the gate's collapse and the plain mean.
"""

import json

import torch
from baselines import RECIPE, ROOT  # beside this file
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer

from hyperdflash.common.checkpoint import load_target
from hyperdflash.common.files import write_atomically
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.arguments import load_recipe
from hyperdflash.training.data import load_recipe_data

OUTPUT = ROOT / "docs" / "results" / "paths.json"


@torch.no_grad()
def residuals(args) -> tuple[torch.Tensor, torch.Tensor]:
    """Residuals `(N, m, D)` at all positions of the validation texts, and the gate's weights of the paths `(N, m)`."""
    target, _ = load_target(args.target, None, "float32")
    rows, _ = load_recipe_data(args, args.eval_data, AutoTokenizer.from_pretrained(args.target))
    found = []
    with ResidualTap(target) as tap:
        for row in rows:
            target(torch.tensor([row["input_ids"]]), use_cache=False)
            found.append(tap.take()[0].clone())
    H_NmD = torch.cat(found)
    head = target.model.hc_head
    flat = H_NmD.flatten(1)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + target.config.rms_norm_eps)
    return H_NmD, torch.sigmoid(flat @ head.hc_fn.float().T * head.hc_scale + head.hc_base) + target.config.hc_eps


def main() -> None:
    torch.set_num_threads(1)
    H_NmD, alpha_Nm = residuals(load_recipe(RECIPE))
    mean = H_NmD.mean(1)
    collapse = (alpha_Nm.unsqueeze(-1) * H_NmD).sum(1)
    unit = torch.nn.functional.normalize(H_NmD, dim=-1)
    figures = {
        "command": "python examples/tiny/evidence/residual_paths.py",
        "positions": len(H_NmD),
        "cosine": (unit @ unit.transpose(1, 2)).mean(0).tolist(),
        "energy_outside_mean": float((H_NmD - mean.unsqueeze(1)).square().sum() / H_NmD.square().sum()),
        "gate_mean": alpha_Nm.mean(0).tolist(),
        "gate_std": alpha_Nm.std(0).tolist(),
        "cosine_of_collapse_and_mean": float(cosine_similarity(collapse, mean, dim=-1).mean()),
    }
    rounded = json.loads(json.dumps(figures), parse_float=lambda x: round(float(x), 4))
    write_atomically(OUTPUT, (json.dumps(rounded, indent=1) + "\n").encode())
    print(json.dumps(rounded, indent=1))


if __name__ == "__main__":
    main()
