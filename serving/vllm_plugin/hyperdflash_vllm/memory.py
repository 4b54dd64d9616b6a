"""Pages of the draft's cache that leave the target its own: chosen, and the rest said, by vLLM's own planner.

vLLM cuts its cache into blocks of one size for all layers, as wide as the widest group of layers needs. DeepSeek-V4
keeps a token in few bytes. A draft's ordinary keys and values, with as many positions a page as V4's (256), can take
more than that, and every block then grows by it. A draft layer that slides may have smaller pages, at the price of a
few more blocks for each request.
"""

import copy
from functools import partial

from .checks import logger, vllm_version

SMALLEST = 16  # positions, of any attention kernel
FEW = 0.9
MEMORY = 2**50  # bytes; only counted


class DraftPages:
    """What the draft's attention layers say of their pages, when a worker asks all layers: everything is built then.

    Without the planner that is known here nothing is changed, and the log says so: a figure is not worth a server that
    does not start.
    """

    def __init__(self, layers: list):
        self.layers, self.size = layers, None
        for layer in layers:
            layer.get_kv_cache_spec = partial(self.of, layer)

    def of(self, layer, vllm_config):
        """In the place of `get_kv_cache_spec` of a layer."""
        if self.size is None:
            self.size = vllm_config.cache_config.block_size
            try:
                self.size = self.best_size(vllm_config)
            except Exception as error:  # of another version's planner, whatever it is
                logger.warning(
                    "How many tokens fit into the cache beside the draft is unknown in %s (%s: %s): compare the cache "
                    "size in this log with and without speculative_config",
                    *(vllm_version(), type(error).__name__, error),
                )
        return pages(layer, vllm_config, self.size)

    def best_size(self, vllm_config) -> int:
        """Positions a page with which most tokens fit; the log says how many that are."""
        target = other_pages(vllm_config, {layer.layer_name for layer in self.layers})
        without = tokens_that_fit(vllm_config, target)
        sizes = [vllm_config.cache_config.block_size]
        while any(layer.sliding_window for layer in self.layers) and sizes[-1] >= 2 * SMALLEST:
            sizes.append(sizes[-1] // 2)
        shares = {}
        for size in sizes:
            draft = {layer.layer_name: pages(layer, vllm_config, size) for layer in self.layers}
            shares[size] = tokens_that_fit(vllm_config, {**target, **draft}) / without
        best = max(shares, key=shares.get)  # of equal ones the first, the largest page
        log = logger.warning if shares[best] < FEW else logger.info
        log(
            "Beside the draft, %.0f%% of the tokens fit into the cache that fit without it (pages of %d positions). "
            "More fit with sliding attention in all its layers, fewer key/value heads, more tensor parallelism or "
            '"kv_cache_dtype": "fp8" in speculative_config',
            *(100 * shares[best], best),
        )
        return best


def pages(layer, vllm_config, size: int):
    """What vLLM's own layer says, a sliding one with at most `size` positions a page if its kernel can."""
    if layer.sliding_window is not None:
        vllm_config = copy.copy(vllm_config)
        vllm_config.cache_config = copy.copy(vllm_config.cache_config)
        vllm_config.cache_config.block_size = min(size, vllm_config.cache_config.block_size)
    return type(layer).get_kv_cache_spec(layer, vllm_config)


def other_pages(vllm_config, names: set[str]) -> dict:
    """The pages of the target's layers, all but these."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    said = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in found.items() if name not in names}
    return {name: spec for name, spec in said.items() if spec is not None}


def tokens_that_fit(vllm_config, pages: dict) -> int:
    """Into a cache of one size, whatever that is; vLLM logs it as "KV cache size"."""
    from vllm.v1.core import kv_cache_utils

    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # vLLM 0.32
        planning = kv_cache_utils
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(config.cache_config)
    if config.cache_config.kv_cache_layout is None:  # it is chosen after this: what V4's indexer asks for
        config.cache_config.kv_cache_layout = "BLHNC"
    groups = planning.get_kv_cache_groups(config, dict(pages))
    plan = planning.get_kv_cache_config_from_groups(config, groups, MEMORY)
    return kv_cache_utils.get_kv_cache_capacity(config, plan)[0]
