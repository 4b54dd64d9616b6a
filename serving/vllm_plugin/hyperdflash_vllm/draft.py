"""The draft model: vLLM's Qwen3 DFlash drafter with our reducer in the place of its dense projection, and our head."""

from contextlib import contextmanager

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from .checks import (
    NESTED,
    check_rows,
    check_setup,
    check_target_class,
    check_tensors,
    check_width,
    check_windows,
    logger,
)
from .markov import MarkovHead
from .memory import DraftPages
from .reducer import REDUCERS
from .target import HyperDeepseekV4ForCausalLM


class HyperDFlashLayers(DFlashQwen3Model):
    """vLLM's layers; on a CPU the context's keys are normed layer by layer."""

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """`(layers, T, key/value heads, head_dim)`, each layer with its own weight.

        vLLM's CPU kernel takes one weight only: given a row for each layer, it norms every layer with the first.
        """
        if all_k.device.type != "cpu":
            return super()._normalize_context_k(all_k)
        return torch.stack([layer.self_attn.k_norm(k) for layer, k in zip(self.layers, all_k, strict=True)])


class DFlashHyperDraftModel(DFlashQwen3ForCausalLM):
    """Raises what `checks` raises for a set-up or a file that does not fit."""

    model_cls = HyperDFlashLayers

    def __init__(self, *, vllm_config, prefix: str = ""):
        check_setup(vllm_config)
        check_target_class(get_model_cls(vllm_config.model_config), HyperDeepseekV4ForCausalLM)
        nested = getattr(vllm_config.speculative_config.draft_model_config.hf_config, NESTED)
        with without_target_window(get_current_vllm_config().cache_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        attention = [layer.self_attn.attn for layer in self.model.layers]
        check_windows([layer.sliding_window for layer in attention], nested)
        DraftPages(attention)
        self.num_features = nested["hc_mult"] * nested["target_hidden_size"]
        device = self.model.fc.weight.device
        if nested["reducer"] != "fc":
            del self.model.fc
            self.model.reducer = REDUCERS[nested["reducer"]](nested, device=device)
        self.num_drafts, self.query_ids = vllm_config.speculative_config.num_speculative_tokens, None
        if nested["draft_head"] == "markov":
            self.model.markov_head = MarkovHead(nested, device=device)
            # A runner that samples drafts keeps its logits for verification in the head's own dtype
            sampled = vllm_config.speculative_config.draft_sample_method == "probabilistic"
            self.biased_dtype = vllm_config.model_config.head_dtype if sampled else torch.float32
        if nested["draft_confidence"]:
            logger.warning(
                "The drafter's confidence head is not used: num_speculative_tokens sets the drafts per round"
            )

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """All paths of each token, `(T, hc_mult * target_hidden_size)`, become `(T, D)`."""
        check_width(hidden_states.shape[-1], self.num_features)
        reducer = self.model.reducer if hasattr(self.model, "reducer") else self.model.fc
        return reducer(hidden_states)

    def forward(self, input_ids, positions, inputs_embeds=None) -> torch.Tensor:
        """As vLLM's. The ids, of which each request has its anchor and its masks, are kept for `compute_logits`.

        They are a view of the runner's buffer. A graph that was captured is replayed without this call, so the longest
        view of the same buffer is kept.
        """
        if hasattr(self.model, "markov_head"):
            kept = self.query_ids
            if kept is None or kept.data_ptr() != input_ids.data_ptr() or len(kept) < len(input_ids):
                self.query_ids = input_ids
        return super().forward(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """As vLLM's, `(B * N, V)` of N drafts for each request in order; with a sequential head, see `markov.py`."""
        logits = super().compute_logits(hidden_states)
        if logits is None or not hasattr(self.model, "markov_head"):
            return logits
        N = self.num_drafts
        check_rows(len(logits), N, 0 if self.query_ids is None else len(self.query_ids))
        anchor_ids = self.query_ids[: len(logits) // N * (N + 1) : N + 1]
        return self.model.markov_head(logits, hidden_states, anchor_ids, self.biased_dtype)

    def load_weights(self, weights) -> None:
        """As vLLM's, which does not notice a tensor that is missing. The confidence head stays in the file."""
        found = set()

        def noted():
            for name, tensor in weights:
                found.add(name)
                if not name.startswith("confidence_head."):
                    yield name, tensor

        super().load_weights(noted())
        check_tensors(found, self.stored_names())

    def stored_names(self) -> set[str]:
        """The names of all tensors in the draft's file."""
        config = self.config
        layer = [
            "input_layernorm",
            "post_attention_layernorm",
            *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
            *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        ]
        names = {f"layers.{i}.{name}.weight" for i in range(config.num_hidden_layers) for name in layer}
        own = ("reducer.", "fc.", "markov_head.")
        ours = {name for name, _ in self.model.named_parameters() if name.startswith(own)}
        return names | {"norm.weight", "hidden_norm.weight"} | ours


@contextmanager
def without_target_window(cache_config):
    """A draft layer with full attention would take the window that vLLM notes in the cache's configuration, which is
    DeepSeek-V4's 128 tokens."""
    window, cache_config.sliding_window = cache_config.sliding_window, None
    try:
        yield
    finally:
        cache_config.sliding_window = window


__all__ = ["DFlashHyperDraftModel"]
