"""Muon for the matrices inside the layers and AdamW for the rest, which is how DeepSeek-V4 itself was trained.

The tiny target needs about two thirds of the steps that it needs with AdamW alone. `torch.optim.Muon` takes plain
matrices only, and transformers keeps the experts of a layer in one tensor.
"""

import torch
from torch import nn


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """`(N, rows, columns)` -> the same with all singular values near 1, by five Newton-Schulz steps in fp32."""
    wide = matrices.shape[1] <= matrices.shape[2]
    X = matrices if wide else matrices.mT
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X if wide else X.mT


class MuonAdamW(torch.optim.AdamW):
    """`AdamW` in which the groups with `"muon": True` take Muon's step: momentum 0.95 (Nesterov), made orthogonal, and
    scaled to the usual size of an AdamW step (arXiv 2502.16982)."""

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        for group in (group for group in groups if group.get("muon")):
            self._step_of_muon(group)
        self.param_groups = [group for group in groups if not group.get("muon")]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def _step_of_muon(self, group: dict) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, parameters in by_shape.items():
            updates = []
            for parameter in parameters:
                state = self.state[parameter]
                if not state:  # `AdamW` looks for a step when it is loaded
                    state |= {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(parameter)}
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 0.05)
                updates.append(parameter.grad.lerp(momentum, 0.95))
            updates = orthogonalise(torch.stack(updates).view(-1, *shape[-2:])).view(-1, *shape)
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(shape[-2:]) ** 0.5)


def make_optimizer(model: nn.Module, decayed: list[str], learning_rate: float, weight_decay: float) -> MuonAdamW:
    """Muon at three times the learning rate for every matrix of the layers but routers and hyper-connections."""
    groups: dict[str, list[nn.Parameter]] = {"muon": [], "decay": [], "other": []}
    for name, parameter in model.named_parameters():
        inside = not any(part in name for part in ("hc", "embed_tokens", "lm_head", "position_bias", "gate.weight"))
        kind = "other" if name not in decayed else "muon" if inside and parameter.ndim >= 2 else "decay"
        groups[kind].append(parameter)
    return MuonAdamW(
        [
            {"params": groups["muon"], "lr": 3 * learning_rate, "weight_decay": weight_decay, "muon": True},
            {"params": groups["decay"], "lr": learning_rate, "weight_decay": weight_decay},
            {"params": groups["other"], "lr": learning_rate, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
