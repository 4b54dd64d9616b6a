"""The sequential head: the logits of a slot get a bias from the token chosen for the slot before it.

vLLM asks for the logits of all slots at once and only then chooses. So the choices are made here, by argmax, slot
after slot and for all requests side by side; with greedy drafts, vLLM's default, they are the very tokens that it
chooses afterwards. A draft that is sampled (`draft_sample_method: probabilistic`) comes from the distribution of its
row, which follows the likeliest drafts before it instead of the sampled ones. It is a proper distribution, the one
that vLLM verifies with, so the output stays the target's own; only fewer drafts are accepted.

Legend: B requests, N drafts of each, D hidden, R rank, V vocabulary.
"""

import torch
from torch import nn


class MarkovHead(nn.Module):
    """`markov_w2 @ markov_w1[previous]`, where the slot's hidden state weighs the R parts if there is a gate.

    Fixed shapes and no look at a value, so that a CUDA graph can hold it.
    """

    def __init__(self, config: dict, device: torch.device | str | None = None):
        super().__init__()
        D, R, V = config["hidden_size"], config["markov_rank"], config["vocab_size"]
        self.markov_w1, self.markov_w2 = (
            nn.Parameter(torch.empty(V, R, device=device), requires_grad=False) for _ in range(2)
        )
        self.gate = nn.Linear(D, R, device=device).requires_grad_(False) if config["markov_gate"] else None

    def forward(
        self, logits: torch.Tensor, hidden_states: torch.Tensor, anchor_ids: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Logits with the bias of what was chosen before.

        Args:
            logits, hidden_states: `(B * N, V)` and `(B * N, D)`, the slots of a request in order.
            anchor_ids: `(B,)`, the token before the first slot of each request.
            dtype: of the result, and so of what is compared.

        Returns `(B * N, V)`.
        """
        B = anchor_ids.shape[0]
        logits_BNV, hidden_BND = logits.unflatten(0, (B, -1)), hidden_states.unflatten(0, (B, -1))
        biased_BNV = torch.empty_like(logits_BNV, dtype=dtype)
        previous = anchor_ids
        for slot in range(logits_BNV.shape[1]):
            states = nn.functional.embedding(previous, self.markov_w1)
            if self.gate is not None:
                states = states * torch.sigmoid(self.gate(hidden_BND[:, slot]))
            bias = nn.functional.linear(states, self.markov_w2)
            biased_BNV[:, slot] = logits_BNV[:, slot].float() + bias.float()
            previous = biased_BNV[:, slot].argmax(-1)
        return biased_BNV.flatten(0, 1)
