"""DeepSeek-V4 that hands its residual paths to a HyperDFlash drafter, in the place of averaged hidden states.

vLLM keeps the residual before hc_head in a buffer, for native MTP, and gives a DFlash draft a list of "auxiliary"
states. With our drafter that list is the paths, views of the buffer; with any other draft this is vLLM's class.
"""

from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

from .checks import check_buffer, check_fingerprint, check_fresh, check_setup, draft_config, mark_stale


class HyperDeepseekV4ForCausalLM(DeepseekV4ForCausalLM):
    """vLLM's class for the platform; raises what `checks` raises, before weights are read where that is possible."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        drafter = draft_config(vllm_config.speculative_config)
        if drafter is not None:
            check_setup(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafter = drafter
        self.checked = False
        if drafter is not None:
            check_buffer(self.get_mtp_target_hidden_states(), self.config.hc_mult * self.config.hidden_size)

    def load_weights(self, weights):
        """As vLLM's; then the target is compared with the one that the drafter was made for."""
        loaded = super().load_weights(weights)
        if self.drafter is not None:
            model = self.model
            tensors = {name: getattr(model, name) for name in ("hc_head_fn", "hc_head_base", "hc_head_scale")}
            check_fingerprint(self.drafter, {**tensors, "norm.weight": model.norm.weight})
        return loaded

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """No layer is tapped for our drafter: its `target_layer_ids` count paths."""
        super().set_aux_hidden_state_layers(() if self.drafter is not None else layers)

    def forward(self, *args, **kwargs):
        """vLLM's output; with our drafter, also the `hc_mult` paths, each `(T, D)`."""
        if self.drafter is None:
            return super().forward(*args, **kwargs)
        buffer = self.get_mtp_target_hidden_states()
        # The first forward is vLLM's profiling run: no CUDA graph is captured yet, so a value may be looked at
        first, self.checked = not self.checked, True
        if first:
            mark_stale(buffer)
        hidden = super().forward(*args, **kwargs)
        paths = buffer[: hidden.shape[0]]
        if first:
            check_fresh(paths)
        return hidden, list(paths.chunk(self.config.hc_mult, dim=-1))


__all__ = ["HyperDeepseekV4ForCausalLM"]
