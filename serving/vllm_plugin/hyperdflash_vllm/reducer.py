"""The target's residual paths become one vector, as in the drafter's own code.

Legend: T tokens, D hidden, m residual paths.
"""

import torch
from torch import nn

CHUNK = 1024  # tokens: a whole prefill in fp32 would be several times the target's buffer


class GateReducer(nn.Module):
    """`alpha = sigmoid(hc_fn @ RMSNorm(vec(H)) * hc_scale + hc_base) + eps`; `y = sum_j alpha_j * RMSNorm_j(H_j)`.

    In fp32, a chunk of tokens after the other, with fixed shapes and without a look at a value, so that a CUDA graph
    can hold it.
    """

    def __init__(self, config: dict, device: torch.device | str | None = None):
        super().__init__()
        m, D = config["hc_mult"], config["hidden_size"]
        self.m, self.eps, self.norm_eps = m, config["hc_eps"], config["rms_norm_eps"]

        def parameter(*shape):
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)

        self.hc_fn, self.hc_base, self.hc_scale = parameter(m, m * D), parameter(m), parameter(1)
        self.path_norm = parameter(m, D) if config["reducer_path_norm"] else None

    def forward(self, paths: torch.Tensor) -> torch.Tensor:
        """`(T, m * D)` -> `(T, D)`, in the input's dtype."""
        return torch.cat([self.reduce(part) for part in paths.split(CHUNK)])

    def reduce(self, paths: torch.Tensor) -> torch.Tensor:
        """`forward` of one chunk."""
        flat = paths.float()
        H_TmD = flat.unflatten(-1, (self.m, -1))
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        alpha_Tm = torch.sigmoid(flat @ self.hc_fn.T * self.hc_scale + self.hc_base) + self.eps
        if self.path_norm is not None:
            H_TmD = H_TmD * torch.rsqrt(H_TmD.square().mean(-1, keepdim=True) + self.norm_eps) * self.path_norm
        return (alpha_Tm.unsqueeze(-1) * H_TmD).sum(-2).to(paths.dtype)


class MeanReducer(nn.Module):
    """Average of the paths."""

    def __init__(self, config: dict, device: torch.device | str | None = None):
        super().__init__()
        self.m = config["hc_mult"]

    def forward(self, paths: torch.Tensor) -> torch.Tensor:
        """`(T, m * D)` -> `(T, D)`, in the input's dtype."""
        return paths.unflatten(-1, (self.m, -1)).mean(-2)


# "fc" is vLLM's own dense projection
REDUCERS = {"hc_gate": GateReducer, "mean": MeanReducer}
