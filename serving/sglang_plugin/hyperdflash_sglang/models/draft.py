"""The draft model: SGLang's dense DSpark drafter with our reducer in the place of its dense projection.

Its sequential head is SGLang's: `markov_head_type: gated` weighs it by slot and previous token, and `export` writes
zeros for the latter. A drafter without a head has one of rank 1 that adds zero, as DSPARK wants one.
"""

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.dspark import DSparkDraftModel
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.ragged_verify import read_ragged_verify_mode

from ..checks import (
    NESTED,
    check_draft,
    check_layers,
    check_target_class,
    check_tensors,
    check_width,
    warn_of_memory,
)
from ..reducer import REDUCERS
from .target import DeepseekV4ForCausalLM


class DSparkHyperDraftModel(DSparkDraftModel):
    """Raises what `checks` raises for a set-up or a file that does not fit."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        check_draft(config, get_spec().speculative_num_draft_tokens, read_ragged_verify_mode().value)
        check_target_class(ModelRegistry.models.get("DeepseekV4ForCausalLM"), DeepseekV4ForCausalLM)
        nested = getattr(config, NESTED)
        super().__init__(config, quant_config, prefix)
        attentions = [layer.self_attn for layer in self.layers]
        check_layers([(a.sliding_window_size, a.attn_type == AttentionType.ENCODER_ONLY) for a in attentions], nested)
        self.num_features = nested["hc_mult"] * nested["target_hidden_size"]
        if nested["reducer"] != "fc":
            del self.fc
            self.reducer = REDUCERS[nested["reducer"]](nested)
        if get_parallel().tp_rank == 0:
            warn_of_memory(sum(2 * 2 * a.num_kv_heads * a.head_dim for a in attentions))

    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """All paths of each token, `(T, hc_mult * target_hidden_size)`, become the normed context `(T, D)`."""
        check_width(target_hidden.shape[-1], self.num_features)
        reducer = self.reducer if hasattr(self, "reducer") else self.fc
        return self.hidden_norm(reducer(target_hidden))

    def load_weights(self, weights) -> None:
        """As SGLang's, which does not notice a tensor that is missing or unknown."""
        found = set()

        def noted():
            for name, tensor in weights:
                found.add(name)
                yield name, tensor

        super().load_weights(noted())
        check_tensors(found, self.stored_names())

    def stored_names(self) -> set[str]:
        """The names of all tensors in the draft's file."""
        layer = [
            "input_layernorm",
            "post_attention_layernorm",
            *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
            *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        ]
        names = {f"layers.{i}.{name}.weight" for i in range(len(self.layers)) for name in layer}
        own = ("reducer.", "fc.", "markov_head.")
        ours = {name for name, _ in self.named_parameters() if name.startswith(own)}
        return names | {"norm.weight", "hidden_norm.weight"} | ours


EntryClass = DSparkHyperDraftModel
