"""DeepSeek-V4 that hands its residual paths to a HyperDFlash drafter, in the place of averaged hidden states.

A DSPARK draft names layers for the target to capture, of which V4 keeps the mean over the paths. Where it captures
none, as for its own MTP module, the logits processor passes on the residual before hc_head: all paths, every row.
"""

import json

from sglang.srt.models import deepseek_v4
from sglang.srt.runtime_context import get_model, get_parallel, get_spec
from sglang.srt.utils.hf_transformers_utils import get_config

from ..checks import NESTED, check_fingerprint, check_target, warn_that_it_never_ran

COMPARED = ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")


def served_drafter() -> dict | None:
    """The configuration of the drafter that the server was given, or None when it is no HyperDFlash drafter.

    Read as SGLang itself reads a draft's configuration beside V4 (`draft_is_deepseek_v4`).
    """
    spec, model = get_spec(), get_model()
    if not spec.speculative_draft_model_path:
        return None
    config = get_config(
        spec.speculative_draft_model_path,
        trust_remote_code=model.trust_remote_code,
        revision=spec.speculative_draft_model_revision,
        model_override_args=json.loads(model.json_model_override_args),
        model_config_parser=model.model_config_parser,
    )
    return getattr(config, NESTED, None)


class DeepseekV4ForCausalLM(deepseek_v4.DeepseekV4ForCausalLM):
    """SGLang's class, in whose place it is registered; raises what `checks` raises, before weights are read where that
    is possible."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        drafter = served_drafter()
        if drafter is not None:
            warn_that_it_never_ran()
            check_target(config, drafter, get_parallel().pp_size)
        super().__init__(config, quant_config, prefix)
        self.drafter, self.compared = drafter, False

    def set_dspark_layers_to_capture(self, layer_ids: list[int]) -> None:
        """No layer is captured for our drafter: its `target_layer_ids` count paths."""
        if self.drafter is None:
            super().set_dspark_layers_to_capture(layer_ids)

    def load_weights(self, weights, is_nextn: bool = False):
        """As SGLang's; then the target is compared with the one that the drafter was made for. Weights that come
        later, while it serves, are taken as they are."""
        loaded = super().load_weights(weights, is_nextn)
        if self.drafter is not None and not self.compared:
            self.compared = True
            check_fingerprint(self.drafter, {name: self.model.get_parameter(name) for name in COMPARED})
        return loaded


EntryClass = DeepseekV4ForCausalLM
