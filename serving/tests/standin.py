"""A target with DeepSeek-V4's public contract and vLLM's ordinary layers: what the plug-in's classes see of a target.

DeepSeek-V4's own kernels need AVX512 on a CPU, and the tests' shim; its attention there knows neither preemption with
several requests on the V2 runner nor two processes. This one has as many residual paths, the buffer before `hc_head`
and its methods, and between them Qwen3's layers, so that schedulers, caches, samplers and processes are vLLM's own.
`install` puts it where the plug-in looks for vLLM's class; its checkpoint is made by `make_tiny.py`.
"""

import torch
from torch import nn


def make_class() -> type:
    """The class; vLLM is imported for it."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader
    from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3, SupportsPP
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer

    stacked = {name: ("qkv_proj", name[0]) for name in ("q_proj", "k_proj", "v_proj")}
    stacked |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}

    class Layers(nn.Module, EagleModelMixin):
        def __init__(self, vllm_config, prefix):
            super().__init__()
            config = vllm_config.model_config.hf_config
            m, D = config.hc_mult, config.hidden_size
            self.config, self.hc_mult, self.aux_hidden_state_layers = config, m, ()
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, D)
            self.layers = nn.ModuleList(
                Qwen3DecoderLayer(config, vllm_config.cache_config, prefix=f"{prefix}.layers.{i}")
                for i in range(config.num_hidden_layers)
            )
            # How a layer reads the paths, and how it writes to them
            self.read, self.write = (nn.Parameter(torch.empty(config.num_hidden_layers, m)) for _ in range(2))
            self.hc_head_fn, self.hc_head_base, self.hc_head_scale = (
                nn.Parameter(torch.empty(shape, dtype=torch.float32)) for shape in ((m, m * D), (m,), (1,))
            )
            self.norm = RMSNorm(D, eps=config.rms_norm_eps)
            self.requires_grad_(False)
            spec = vllm_config.speculative_config
            self._mtp_hidden_buffer = None
            if spec is not None and spec.use_eagle():
                self._mtp_hidden_buffer = torch.empty(
                    vllm_config.scheduler_config.max_num_batched_tokens, m * D, dtype=vllm_config.model_config.dtype
                )

        def forward(self, input_ids, positions, inputs_embeds=None):
            hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            H_TmD = hidden.unsqueeze(1).repeat(1, self.hc_mult, 1)
            for i, layer in enumerate(self.layers):
                x_TD = (self.read[i][:, None] * H_TmD).sum(1)
                output, residual = layer(positions, x_TD, None)
                H_TmD = H_TmD + self.write[i][:, None] * (output + residual - x_TD).unsqueeze(1)
            if self._mtp_hidden_buffer is not None:
                self._mtp_hidden_buffer[: len(H_TmD)].copy_(H_TmD.flatten(1))
            flat = H_TmD.flatten(1).float()
            flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
            alpha_Tm = torch.sigmoid(flat @ self.hc_head_fn.T * self.hc_head_scale + self.hc_head_base)
            return self.norm((alpha_Tm.unsqueeze(-1) * H_TmD).sum(1).to(hidden.dtype))

    class StandIn(nn.Module, SupportsPP, SupportsEagle3):
        def __init__(self, *, vllm_config, prefix: str = ""):
            super().__init__()
            self.config = vllm_config.model_config.hf_config
            self.model = Layers(vllm_config, "model")
            self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size)
            self.logits_processor = LogitsProcessor(self.config.vocab_size)

        def embed_input_ids(self, input_ids):
            return self.model.embed_tokens(input_ids)

        def make_empty_intermediate_tensors(self, batch_size, dtype, device):
            raise NotImplementedError("one pipeline stage")

        def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
            return self.model(input_ids, positions, inputs_embeds)

        def compute_logits(self, hidden_states):
            return self.logits_processor(self.lm_head, hidden_states)

        def get_mtp_target_hidden_states(self):
            return self.model._mtp_hidden_buffer

        def load_weights(self, weights):
            parameters, loaded = dict(self.named_parameters()), set()
            for name, tensor in weights:
                name = {"head.weight": "lm_head.weight", "embed.weight": "model.embed_tokens.weight"}.get(
                    name, f"model.{name}"
                )
                part = next((part for part in stacked if f".{part}." in name), None)
                shard = ()
                if part is not None:
                    name, shard = name.replace(part, stacked[part][0]), stacked[part][1:]
                parameter = parameters[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *shard)
                loaded.add(name)
            return loaded

    return StandIn


def install() -> None:
    """From now on, in this process, this is vLLM's DeepSeek-V4. Before the plug-in's target is imported."""
    import vllm.models.deepseek_v4

    vllm.models.deepseek_v4.DeepseekV4ForCausalLM = make_class()
