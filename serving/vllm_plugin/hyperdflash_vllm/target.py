"""DeepSeek-V4 that hands its residual paths to a HyperDFlash drafter, in the place of averaged hidden states.

vLLM keeps the residual before hc_head in a buffer, for native MTP, and gives a DFlash draft a list of "auxiliary"
states. With our drafter that list is the paths, views of the buffer. Where features are written for training there is
no draft: this model gets a buffer of its own and shows its rows to a `PromptWriter`. Otherwise this is vLLM's class.
"""

from pathlib import Path

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

from .capture import PromptWriter
from .checks import (
    check_buffer,
    check_features_setup,
    check_fingerprint,
    check_fresh,
    check_setup,
    draft_config,
    features_folder,
    mark_stale,
)

COMPARED = ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")


class HyperDeepseekV4ForCausalLM(DeepseekV4ForCausalLM):
    """vLLM's class for the platform; raises what `checks` raises, before weights are read where that is possible."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        drafter = draft_config(vllm_config.speculative_config)
        folder = features_folder(vllm_config.additional_config)
        if folder is not None:
            check_features_setup(vllm_config, folder)
        elif drafter is not None:
            check_setup(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafter, self.writes_features = drafter, folder is not None
        self.unseen, self.checked = set(COMPARED), False
        width = self.config.hc_mult * self.config.hidden_size
        # All workers of a replica hold the same residual
        self.writer = None
        if self.writes_features and get_tensor_model_parallel_rank() == 0:
            self.writer = PromptWriter(Path(folder), self.config.hc_mult)
        if self.writes_features and hasattr(self.model, "_mtp_hidden_buffer"):
            self.model._mtp_hidden_buffer = torch.empty(
                vllm_config.scheduler_config.max_num_batched_tokens,
                width,
                dtype=vllm_config.model_config.dtype,
                device=self.model.hc_head_fn.device,
            )
        if self.reads_buffer:
            check_buffer(self.get_mtp_target_hidden_states(), width)

    @property
    def reads_buffer(self) -> bool:
        return self.drafter is not None or self.writes_features

    def load_weights(self, weights):
        """As vLLM's; once these tensors are there, in one call or in several, the target is compared with the one that
        the drafter was made for, or gives its name to the features. Weights that come later are taken as they are."""
        if not self.reads_buffer or not self.unseen:
            return super().load_weights(weights)

        def noted():
            for name, tensor in weights:
                self.unseen.discard(name.removeprefix("model."))
                yield name, tensor

        loaded = super().load_weights(noted())
        if not self.unseen:
            tensors = {name: self.model.get_parameter(name) for name in COMPARED}
            if self.drafter is not None:
                check_fingerprint(self.drafter, tensors)
            if self.writer is not None:
                self.writer.open(tensors)
        return loaded

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """No layer is tapped for our drafter: its `target_layer_ids` count paths."""
        super().set_aux_hidden_state_layers(() if self.drafter is not None else layers)

    def forward(self, input_ids, positions, *args, **kwargs):
        """vLLM's output; with our drafter, also the `hc_mult` paths, each `(T, D)`."""
        if not self.reads_buffer:
            return super().forward(input_ids, positions, *args, **kwargs)
        buffer = self.get_mtp_target_hidden_states()
        # No CUDA graph is captured yet, so a value may be looked at: the first forward is vLLM's profiling run. On a
        # CPU, V1's runner has none without compilation, and it is the first request's
        first, self.checked = not self.checked, True
        if first:
            mark_stale(buffer)
        hidden = super().forward(input_ids, positions, *args, **kwargs)
        paths = buffer[: hidden.shape[0]]
        if first:
            check_fresh(paths)
        if self.writes_features:
            # vLLM's own runs, to profile or to keep replicas in step, have no metadata, and rows of the batch before
            if self.writer is not None and get_forward_context().attn_metadata is not None:
                self.writer.take(input_ids, positions, paths)
            return hidden
        return hidden, list(paths.chunk(self.config.hc_mult, dim=-1))


__all__ = ["HyperDeepseekV4ForCausalLM"]
