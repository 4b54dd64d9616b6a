"""What makes a training step of the tiny V4 cheap on a CPU core; the numbers stay those of transformers' code.

- `fast_hyper_connections()`: 20 Sinkhorn rounds on 4 x 4 matrices with the tokens in the last dimension, so that every
  operation is vectorised. In transformers' layout they take a quarter of the step.
- `head_loss`: cross-entropy of the LM head by chunks that fit the cache; the logits of a batch are never stored.

Everything stays in fp32. Autocast to bf16 does not pay, even with AVX512-BF16: the products alone run 2.3 times as
fast, and the whole step is slower, as autocast casts what is not a product.
"""

import torch
from torch.nn import functional as F
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer, DeepseekV4HyperConnection

CHUNK = 512  # rows of logits at a time: 8 MB in fp32


class _HeadLoss(torch.autograd.Function):
    """Sum of the cross-entropies; the gradients are computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total, correct = hidden.new_zeros(()), 0
        for rows in torch.arange(len(hidden)).split(CHUNK):
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = F.linear(hidden[rows], weight)
            wanted = labels[rows, None]
            correct += int((logits.argmax(-1, keepdim=True) == wanted).sum())
            logp = logits.log_softmax(-1)
            total -= logp.gather(1, wanted).sum()
            grad = logp.exp_()
            grad.scatter_add_(1, wanted, grad.new_full(wanted.shape, -1.0))
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight.addmm_(grad.T, hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(accuracy := torch.tensor(correct / max(len(hidden), 1)))
        return total, accuracy

    @staticmethod
    def backward(ctx, grad, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy and accuracy over the labels that are not -100.

    Args:
        hidden: `(B, T, D)`. weight: `(V, D)`, of the LM head. labels: `(B, T)`, already shifted.
    """
    keep = labels.flatten() != -100
    hidden, labels = hidden.flatten(0, 1)[keep].float(), labels.flatten()[keep]
    with torch.autocast(hidden.device.type, enabled=False):
        total, accuracy = _HeadLoss.apply(hidden, weight.float(), labels)
    return total / len(labels), accuracy


def _forward(self, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`DeepseekV4HyperConnection.forward`, with the tokens last."""
    B, T, m, D = hidden_streams.shape
    flat = self.input_norm(hidden_streams.reshape(B * T, m * D).float())
    weights = F.linear(flat, self.fn.float()).T.contiguous()  # (2 m + m m, N)
    scale = self.scale.repeat_interleave(torch.tensor([m, m, m * m], device=self.scale.device))
    pre, post, comb = torch.addcmul(self.base[:, None], weights, scale[:, None]).split([m, m, m * m])
    pre, post = torch.sigmoid(pre) + self.hc_eps, 2 * torch.sigmoid(post)
    comb = comb.view(m, m, -1).softmax(1) + self.hc_eps  # (from, to, N)
    comb = comb / (comb.sum(0, keepdim=True) + self.hc_eps)
    for _ in range(self.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + self.hc_eps)
        comb = comb / (comb.sum(0, keepdim=True) + self.hc_eps)
    collapsed = (pre.T.reshape(B, T, m, 1) * hidden_streams).sum(2).to(hidden_streams.dtype)
    comb = comb.permute(2, 0, 1).contiguous().view(B, T, m, m)  # strided, the layer's matmul would copy every matrix
    return post.T.reshape(B, T, m), comb, collapsed


def _mix(post: torch.Tensor, out: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """What a sub-layer leaves on the paths, `(B, T, m, D)`: its output written to each, and the paths mixed.

    `post`: `(B, T, m)`. `out`: `(B, T, D)`. `comb`: `(B, T, from, to)`. A sum of m products instead of a matrix
    product of 4 x 4 matrices per token, which no library runs well."""
    m = comb.shape[-1]
    return torch.stack(
        [
            post[..., to, None] * out + sum(comb[..., i, to, None] * streams[..., i, :] for i in range(m))
            for to in range(m)
        ],
        dim=-2,
    )


def fast_hyper_connections(compiled: bool = False) -> None:
    """Let every hyper-connection of this process work with the tokens last.

    `compiled` by `torch.compile`, which needs a C++ compiler and two minutes at its first run, a step is a third
    faster.
    """
    DeepseekV4HyperConnection.forward = _forward
    if not compiled:
        return
    DeepseekV4HyperConnection.forward = torch.compile(_forward, dynamic=True)
    mix = torch.compile(_mix, dynamic=True)

    def layer(self, hidden_states, input_ids=None, **kwargs):
        post, comb, collapsed = self.attn_hc(hidden_states)
        out, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
        hidden_states = mix(post, out, comb, hidden_states)
        post, comb, collapsed = self.ffn_hc(hidden_states)
        out = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
        return mix(post, out, comb, hidden_states)

    DeepseekV4DecoderLayer.forward = layer
