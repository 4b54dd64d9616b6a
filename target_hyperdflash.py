"""What DeepSeek-V4 is given: rewindable cache layers, assisted generation, and a tap on its residual.

Speculative decoding writes K positions into the target's cache and then takes back the rejected ones. V4's own layers
cannot do that: their compressors fold tokens into entries as they arrive. The layers here keep what one rewind needs
and nothing more. While recording (`activate_past_recording`), each forward leaves its raw projected rows and the first
series of every window it closed; `crop(-r)` rebuilds buffer, entries and overlap from them, without recomputation and
bit for bit as a fresh run would hold them, and drops the record. Without recording they behave and weigh as the
library's layers.

Importing this file (loading a drafter does) gives `DeepseekV4ForCausalLM` three things, once per process
(`set_up_deepseek_v4`): an assistant model and prompt lookup are no longer refused, the caches of their calls get
rewindable layers, and `_assisted_decoding` hands over to an assistant that brings its own loop. Everything else that
transformers refuses for a stateful model (early exit, recipes that crop a cache) stays refused, and plain `generate`
is untouched.

Nothing here depends on a drafter. Shapes: `keys` (= `values`, V4 shares them) `(B, 1, T, head_dim)`; compressor rows
`(B, T, width)`; entries `(B, entries, head_dim)`; overlap slices `(B, rate, head_dim)`; residual `(B, T, m, D)`.
Windows of CSA and HCA: DeepSeek-V4 paper, section 2.3.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.utils import logging

from .configuration_hyperdflash import TESTED_TRANSFORMERS

logger = logging.get_logger(__name__)

UNTESTED_TRANSFORMERS = (
    "transformers {version} lacks what HyperDFlash builds on: {what}; tested versions: "
    + ", ".join(TESTED_TRANSFORMERS)
)

try:
    from transformers.cache_utils import DynamicSlidingWindowLayer
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache
except ImportError as error:
    raise ImportError(UNTESTED_TRANSFORMERS.format(what=error, version=transformers.__version__)) from error


# ---------------------------------------------------------------------------------------------------- rewindable cache


class RewindableSlidingLayer(DynamicSlidingWindowLayer):
    """Sliding-window K = V that can take back every position written since recording or the last `crop`; with
    `max_rewind`, at most the last `max_rewind` positions, and no more is kept on record than that needs."""

    max_rewind: int | None = None  # positions; None keeps all that was recorded

    def __init__(self, sliding_window: int, **kwargs):
        super().__init__(sliding_window=sliding_window)
        self.num_recorded = 0  # positions that `crop` may still remove

    def activate_past_recording(self) -> None:
        """Start to keep what a rewind needs; what was cached before cannot be taken back."""
        if not self.record_past:
            self.record_past = True
            self.num_recorded = 0

    def deactivate_past_recording(self) -> None:
        """Drop the record and fall back to the memory of a plain cache."""
        self.crop(0)
        self.record_past = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append `(B, 1, T, head_dim)`; returns the positions that `get_mask_sizes` announced, twice (K = V)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_new = key_states.shape[-2]
        full = torch.cat([self.keys, key_states], dim=-2) if self.keys.numel() else key_states
        # While recording, `full` is longer than the mask, which is made for a plain layer
        visible = full[:, :, -(self.sliding_window - 1 + num_new) :, :]
        num_recorded = self.num_recorded + num_new if self.record_past else 0
        kept = full if self.record_past else self._window(full)
        if self.record_past and self.max_rewind is not None:
            num_recorded = min(num_recorded, self.max_rewind)
            # A rewind of `max_rewind` positions still has to leave a whole window
            kept = _rows_from(full, full.shape[-2] - (self.sliding_window - 1 + self.max_rewind), dim=-2)
        # One step: an interruption (Ctrl-C) between two lines would leave a counter that its tensor does not match
        vars(self).update(
            keys=kept, values=kept, cumulative_length=self.cumulative_length + num_new, num_recorded=num_recorded
        )
        return visible, visible

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` positions and drop the record.

        Raises `RuntimeError` when more positions are to go than were recorded, `ValueError` for a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of positions to remove, got {tokens_to_remove}")
        num_removed = -tokens_to_remove
        if num_removed > self.num_recorded:
            raise RuntimeError(
                f"cannot take back {num_removed} positions: {self.num_recorded} were recorded since "
                "activate_past_recording() or the last crop()"
            )
        vars(self).update(self._rewound(num_removed))  # one step, as in `update`

    def _window(self, keys: torch.Tensor, num_removed: int = 0) -> torch.Tensor:
        """The last `window - 1` positions before the removed ones."""
        num_kept = keys.shape[-2] - num_removed
        # The next position is part of its own window, so one less is kept
        length = min(num_kept, self.sliding_window - 1)
        return keys.narrow(-2, num_kept - length, length)

    def _rewound(self, num_removed: int) -> dict[str, Any]:
        """The attributes as they were `num_removed` positions ago, with an empty record. Changes nothing itself."""
        keys = self.keys
        if keys is not None and keys.ndim == 4:  # before the first update the library keeps an empty vector there
            keys = self._window(keys, num_removed)
        length = self.cumulative_length - num_removed
        return {"keys": keys, "values": keys, "cumulative_length": length, "num_recorded": 0}

    def _map_states(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `fn` to every state tensor (batch first)."""
        if self.keys is not None:
            self.keys = self.values = fn(self.keys)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_states(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_states(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_states(lambda t: t[indices.to(t.device) if isinstance(indices, torch.Tensor) else indices])

    def reset(self) -> None:
        super().reset()
        vars(self).update(self._rewound(0))


class RewindableHCALayer(RewindableSlidingLayer, DeepseekV4HCACache):
    """Heavily compressed attention: the sliding window plus one entry for every `compress_rate` positions."""

    _layer_type = None  # not registered for every cache of the process: see `make_rewindable`

    def __init__(self, config: DeepseekV4Config, **kwargs):
        DeepseekV4HCACache.__init__(self, config)
        self._start_record()

    def _start_record(self) -> None:
        self.num_recorded = 0
        # Per compressor, one item per forward: (first entry not closed before it, raw rows of kv and gate from there)
        self._rows: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}

    def store_compression_weights(self, name: str, kv: torch.Tensor, gate: torch.Tensor):
        """As in the library; the rows from the last entry boundary on go on record."""
        first_entry, rate = self.entry_count[name], self.compress_rate
        buffer_kv = self.buffer_kv[name]
        if buffer_kv is not None and buffer_kv.shape[1]:
            kv = torch.cat([buffer_kv, kv], dim=1)
            gate = torch.cat([self.buffer_gate[name], gate], dim=1)
        if self.record_past:
            skipped = self._first_kept_entry(first_entry) - first_entry
            rows = (_rows_from(x, skipped * rate) for x in (kv, gate))
            self._rows.setdefault(name, []).append((first_entry + skipped, *rows))
        usable = kv.shape[1] // rate * rate  # whole windows; the rest waits in the buffer
        self.buffer_kv[name], self.buffer_gate[name] = kv[:, usable:], gate[:, usable:]
        return kv[:, :usable], gate[:, :usable], first_entry * rate

    def _first_kept_entry(self, first: int) -> int:
        """The first entry, from `first` on, whose rows a rewind of `max_rewind` positions can need."""
        if self.max_rewind is None:
            return first
        return max(first, (self.cumulative_length - self.max_rewind) // self.compress_rate)

    def _rewound(self, num_removed: int) -> dict[str, Any]:
        state = {**super()._rewound(num_removed), "_rows": {}}
        if not num_removed:
            return state
        # Windows lie at multiples of the rate, however the forwards cut the sequence
        num_entries, num_buffered = divmod(state["cumulative_length"], self.compress_rate)
        # Copies: the layer changes in one step, when everything is computed
        buffer_kv, buffer_gate = dict(self.buffer_kv), dict(self.buffer_gate)
        compressed_kv, entry_count = dict(self.compressed_kv), dict(self.entry_count)
        for name, record in self._rows.items():
            if not record:  # an interruption came before its first item
                continue
            # The first forward that reached the new length holds every row since the new last entry boundary
            for first_entry, kv, gate in record:  # noqa: B007
                start = (num_entries - first_entry) * self.compress_rate
                if start + num_buffered <= kv.shape[1]:
                    break
            buffer_kv[name] = kv.narrow(1, start, num_buffered)
            buffer_gate[name] = gate.narrow(1, start, num_buffered)
            # An interrupted forward may have added entries that it did not count yet: the tensor's own length decides
            if compressed_kv[name] is not None and compressed_kv[name].shape[1] > num_entries:
                compressed_kv[name] = compressed_kv[name].narrow(1, 0, num_entries)
            entry_count[name] = num_entries
        return {
            **state,
            "buffer_kv": buffer_kv,
            "buffer_gate": buffer_gate,
            "compressed_kv": compressed_kv,
            "entry_count": entry_count,
        }

    def _map_states(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_states(fn)
        for states in (self.buffer_kv, self.buffer_gate, self.compressed_kv):
            for name, tensor in states.items():
                if tensor is not None:
                    states[name] = fn(tensor)
        for name, record in self._rows.items():
            self._rows[name] = [(first, fn(kv), fn(gate)) for first, kv, gate in record]


class RewindableCSALayer(RewindableHCALayer, DeepseekV4CSACache):
    """Compressed sparse attention: compressor and indexer, whose windows also read the one before (overlap)."""

    _layer_type = None

    def __init__(self, config: DeepseekV4Config, **kwargs):
        DeepseekV4CSACache.__init__(self, config)
        self._start_record()

    def _start_record(self) -> None:
        super()._start_record()
        # Per compressor: (index of the first window, its Ca slices (B, windows, rate, head_dim) of kv and gate)
        self._slices: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}

    def update_overlap_state(self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int):
        if self.record_past:
            record = self._slices.setdefault(name, [])
            first = self.entry_count[name]
            # A rewind may take back the first window recorded, and then needs the slice before it
            if not record and self.overlap_kv[name] is not None:
                record.append((first - 1, self.overlap_kv[name][:, None], self.overlap_gate[name][:, None]))
            # A rewind may end with the entry before the first one kept, whose slice the next window then reads
            skipped = max(self._first_kept_entry(first) - 1 - first, 0)
            slices = (_rows_from(x[..., :head_dim], skipped) for x in (chunk_kv, chunk_gate))
            record.append((first + skipped, *slices))
        return super().update_overlap_state(name, chunk_kv, chunk_gate, head_dim)

    def _rewound(self, num_removed: int) -> dict[str, Any]:
        state = {**super()._rewound(num_removed), "_slices": {}}
        if not num_removed:
            return state
        last_entry = state["cumulative_length"] // self.compress_rate - 1
        overlap_kv, overlap_gate = dict(self.overlap_kv), dict(self.overlap_gate)
        for name, record in self._slices.items():
            if not record:  # an interruption came before its first item
                continue
            overlap_kv[name] = overlap_gate[name] = None  # unless a window is still closed
            for first, kv, gate in record:
                if 0 <= last_entry - first < kv.shape[1]:
                    overlap_kv[name] = kv.select(1, last_entry - first)
                    overlap_gate[name] = gate.select(1, last_entry - first)
        return {**state, "overlap_kv": overlap_kv, "overlap_gate": overlap_gate}

    def _map_states(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_states(fn)
        for states in (self.overlap_kv, self.overlap_gate):
            for name, tensor in states.items():
                if tensor is not None:
                    states[name] = fn(tensor)
        for name, record in self._slices.items():
            self._slices[name] = [(first, fn(kv), fn(gate)) for first, kv, gate in record]


def _rows_from(tensor: torch.Tensor, start: int, dim: int = 1) -> torch.Tensor:
    """The rows from `start` on; a copy where any are left out, as a slice would keep them alive."""
    return tensor.narrow(dim, start, tensor.shape[dim] - start).clone() if start > 0 else tensor


_REWINDABLE = {
    DynamicSlidingWindowLayer: RewindableSlidingLayer,
    DeepseekV4HCACache: RewindableHCALayer,
    DeepseekV4CSACache: RewindableCSALayer,
}


def make_rewindable(cache: Cache, config: DeepseekV4Config) -> Cache:
    """Give a DeepSeek-V4 `DynamicCache` rewindable layers, in place, keeping what it already holds.

    Layers that are rewindable already (also those of another copy of this file) stay as they are. The library's
    registry of layer types is left alone: it has one slot per type for every cache and every model of the process.

    Raises `ValueError` for a cache that is not dynamic, is offloaded, has another number of layers than the config,
    was left half-written by an interrupted call, or has been recording with layers that cannot rewind.
    """
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = "an offloaded cache" if isinstance(cache, DynamicCache) else f"a {type(cache).__name__}"
        raise ValueError(f"DeepSeek-V4 can rewind a DynamicCache only, got {kind}: leave `cache_implementation` unset")
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, DeepSeek-V4's config has {config.num_hidden_layers}: build it "
            "with DynamicCache(config=target.config)"
        )
    check_lengths(cache)
    cache.layers = [_rewindable_layer(layer, config) for layer in cache.layers]
    for layer in cache.layers:
        layer.max_rewind = None  # an interrupted prompt lookup may have left its own
    return cache


def check_lengths(cache: Cache) -> None:
    """Raises `ValueError` for a cache that an interrupted call left in the middle of a forward or of a round: going on
    with it would give other text without a word."""
    lengths = [length for layer in cache.layers for length in _lengths(layer)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the cache's layers hold between {min(lengths)} and {max(lengths)} positions, as an interrupted call "
            "leaves them: start from a new cache"
        )
    if any(getattr(layer, "num_recorded", 0) for layer in cache.layers):
        raise ValueError(
            f"the last positions of the cache's {lengths[0]} are unverified drafts of an interrupted call: start from "
            "a new cache"
        )


def _lengths(layer: CacheLayerMixin) -> Iterator[int]:
    """How many positions a layer holds: by its window's counter, and by the entries and buffers of each compressor."""
    yield layer.get_seq_length()
    for name, num_entries in getattr(layer, "entry_count", {}).items():
        kv, gate, entries = (
            _num_rows(part[name]) for part in (layer.buffer_kv, layer.buffer_gate, layer.compressed_kv)
        )
        # Two sums over different attributes, as an interruption may come between any two updates
        yield layer.compress_rate * num_entries + kv
        yield layer.compress_rate * entries + gate


def _num_rows(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[1]


def _rewindable_layer(layer: CacheLayerMixin, config: DeepseekV4Config) -> CacheLayerMixin:
    cls = _REWINDABLE.get(type(layer))
    if cls is None:
        if hasattr(layer, "deactivate_past_recording"):
            return layer
        raise ValueError(f"cannot make a {type(layer).__name__} layer rewindable: build the cache with its config")
    if layer.record_past and layer.get_seq_length():
        raise ValueError(
            f"the cache's {type(layer).__name__} layers recorded positions before HyperDFlash could keep their state: "
            "start from a new cache"
        )
    new = cls(sliding_window=layer.sliding_window) if cls is RewindableSlidingLayer else cls(config)
    # Tensors and counters move over; the record is not among them, and starts empty
    new.__dict__.update(layer.__dict__)
    return new


# --------------------------------------------------------------------------------------------------------- the set-up


# What the set-up replaces and what it expects of it: a moved seam is reported by name instead of failing deep inside.
_SEAMS = {
    "_assisted_decoding": {
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "assistant_model",
    },
    "_validate_generation_mode": {"generation_mode", "generation_config", "generation_mode_kwargs"},
    "_prepare_cache_for_generation": {"generation_config", "model_kwargs", "generation_mode"},
    "_prefill": {"input_ids", "generation_config", "model_kwargs"},
    "prepare_inputs_for_generation": {"input_ids", "next_sequence_length"},
    "_optimize_model_for_decode": set(),
    "forward": {"input_ids", "attention_mask", "position_ids", "cache", "logits_to_keep"},
}


def set_up_deepseek_v4() -> None:
    """Teach `DeepseekV4ForCausalLM` assisted generation; does nothing the second time, nor from another copy.

    Raises `ImportError` when this transformers version lacks a method that the set-up builds on.
    """
    # A mark on the function itself: remote code is another copy of this module, with its own globals
    if getattr(getattr(DeepseekV4ForCausalLM, "_assisted_decoding", None), "asks_the_assistant", False):
        return
    for name, expected in _SEAMS.items():
        owner = DeepseekV4ForCausalLM if name == "forward" else GenerationMixin
        method = getattr(owner, name, None)
        missing = expected - set(inspect.signature(method).parameters) if method else expected
        if missing:
            what = f"{owner.__name__}.{name}({', '.join(sorted(expected))})"
            raise ImportError(UNTESTED_TRANSFORMERS.format(what=what, version=transformers.__version__))
    if Version(transformers.__version__).release[:2] > Version(TESTED_TRANSFORMERS[-1]).release[:2]:
        logger.warning(
            f"HyperDFlash was tested with transformers {', '.join(TESTED_TRANSFORMERS)}, and "
            f"{transformers.__version__} is installed. The methods that it builds on are there "
            f"({', '.join(_SEAMS)}): compare a greedy answer with and without the drafter once"
        )
    _assisted_decoding.asks_the_assistant = True
    for method in (_assisted_decoding, _validate_generation_mode, _prepare_cache_for_generation):
        name = method.__name__  # the library's signature stays visible: `generate` reads it
        setattr(DeepseekV4ForCausalLM, name, functools.wraps(getattr(GenerationMixin, name))(method))


def _assisted_decoding(self, input_ids: torch.LongTensor, *args, assistant_model=None, **kwargs):
    if (loop := getattr(assistant_model, "assisted_decoding_loop", None)) is not None:
        return loop(self, input_ids, *args, **kwargs)
    if (cache := kwargs.get("cache")) is not None and cache.get_seq_length():
        raise ValueError(
            f"the cache passed in holds {cache.get_seq_length()} positions: transformers' own assisted decoding would "
            "feed them again. Pass no cache, or use a HyperDFlash drafter"
        )
    # Prompt lookup: the library records from before the prompt, and takes back no more than candidates
    if assistant_model is None and cache is not None:
        config = kwargs["generation_config"]
        for layer in cache.layers:
            layer.max_rewind = config.prompt_lookup_num_tokens + 1  # and the token before them, if interrupted
    with recording_stopped(cache):
        return GenerationMixin._assisted_decoding(self, input_ids, *args, assistant_model=assistant_model, **kwargs)


def _validate_generation_mode(
    self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: dict
):
    assistant = generation_mode_kwargs.get("assistant_model")
    if generation_mode == GenerationMode.ASSISTED_GENERATION:
        check_target_state(self)
    if (validate := getattr(assistant, "validate_call", None)) is not None:
        if hasattr(assistant, "_orig_mod"):
            raise ValueError(
                "torch.compile(drafter) makes a wrapper that decoding would not run: compile the drafter in place "
                "with drafter.compile()"
            )
        validate(self, generation_mode, generation_config)
    if _can_rewind_for(assistant, generation_mode, generation_config):
        # All that the library checks for this mode alone is that the model is not stateful, which these caches answer
        generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
    GenerationMixin._validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs)


def check_target_state(target: DeepseekV4ForCausalLM) -> None:
    """Raises `ValueError` for a target that is in a state in which its plain decoding goes wrong too."""
    attention = target.config._attn_implementation
    if attention is not None and attention.startswith("paged|"):
        raise ValueError(
            f"the target's attention is {attention!r}, which DeepSeek-V4 does not have (generate with "
            "cache_implementation='paged' leaves it behind): call target.set_attn_implementation('eager')"
        )
    # peft's prompt-learning methods put virtual tokens before the prompt, through this method of the target's
    adapter = getattr(target.prepare_inputs_for_generation, "__self__", target)
    if getattr(getattr(adapter, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{adapter.active_peft_config.peft_type.value} puts virtual tokens before the prompt, where DeepSeek-V4's "
            "compressed attention misplaces them: use an adapter of the weights, such as LoRA, or the base model"
        )


def _can_rewind_for(assistant, generation_mode: GenerationMode, config: GenerationConfig) -> bool:
    """Whether rewindable layers are all that an assisted call lacks. Early exit and the library's own MTP lack
    more: early exit runs only some layers on the same cache, and V4 has no MTP modules in transformers."""
    return (
        generation_mode == GenerationMode.ASSISTED_GENERATION
        and (assistant is not None or config.prompt_lookup_num_tokens is not None)
        and config.assistant_early_exit is None
        and not config.use_mtp
        and config.num_return_sequences == 1
    )


def _prepare_cache_for_generation(
    self, generation_config: GenerationConfig, model_kwargs: dict, generation_mode: GenerationMode, *args, **kwargs
):
    GenerationMixin._prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, *args, **kwargs
    )
    assisted = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
    if assisted and model_kwargs.get("cache") is not None:
        make_rewindable(model_kwargs["cache"], self.config)


@contextmanager
def recording_stopped(cache: Cache | None) -> Iterator[None]:
    """Stops recording at the end of a call. An interrupted call also takes back what it had not verified, so that the
    cache can be used again; where that fails too, `check_lengths` refuses the cache, and the first error is raised."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            _stop_recording(cache)
        raise
    _stop_recording(cache)


def _stop_recording(cache: Cache | None) -> None:
    layers = [layer for layer in (cache.layers if cache is not None else ()) if hasattr(layer, "num_recorded")]
    # In the middle of a forward some layers have more positions than others, in the middle of a crop some have fewer:
    # all can go back to the longest of what is verified.
    verified = max((layer.get_seq_length() - layer.num_recorded for layer in layers), default=0)
    for layer in layers:
        layer.crop(min(verified - layer.get_seq_length(), 0))  # drops the record too
        layer.record_past, layer.max_rewind = False, None


# ---------------------------------------------------------------------------------------------------- the residual tap


class ResidualTap:
    """Collects what a drafter reads from the target's forwards, for one call.

    Hooks live from `__enter__` to `__exit__`, and see the forwards of the thread that entered only.

    Args:
        layer_ids (`list[int]`, *optional*):
            Zero-based layers whose outputs are read, concatenated on the last axis, `(B, T, m, L * D)`. By default the
            input of hc_head: the final residual before its paths are collapsed, `(B, T, m, D)`.
        last (`int`, *optional*):
            Keep only the last `last` positions. A prompt read in chunks then costs no more than its tail; may be set
            to None later.
    """

    def __init__(self, target: DeepseekV4ForCausalLM, layer_ids: list[int] | None = None, last: int | None = None):
        self.target, self.layer_ids, self.last = target, layer_ids, last
        self._outputs: list[list[torch.Tensor]] = []
        self._handles = []

    def __enter__(self):
        # Hooks belong to the module, so that calls of other threads on the same target run them too
        thread = threading.get_ident()
        model = self.target.model

        def keep(slot, tensor):
            if threading.get_ident() == thread:
                self._keep(self._outputs[slot], tensor)

        if self.layer_ids is None:
            self._outputs = [[]]
            self._handles = [model.hc_head.register_forward_pre_hook(lambda module, args: keep(0, args[0]))]
        else:
            self._outputs = [[] for _ in self.layer_ids]
            self._handles = [
                # slot=slot: a closure would read the loop's last value
                model.layers[i].register_forward_hook(lambda module, args, output, slot=slot: keep(slot, output))
                for slot, i in enumerate(self.layer_ids)
            ]
        return self

    def __exit__(self, *exc):
        for handle in self._handles:
            handle.remove()

    def _keep(self, parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        if self.last is not None:
            tensor = _rows_from(tensor, tensor.shape[1] - self.last)
        parts.append(tensor)
        # A part goes once those after it hold enough: no copy for every forward
        while self.last is not None and sum(part.shape[1] for part in parts[1:]) >= self.last:
            parts.pop(0)

    def take(self) -> torch.Tensor:
        """The residuals of all forwards since the last call, `(B, T, m, L * D)`."""
        layers = [torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] for parts in self._outputs]
        self.clear()
        # A target spread over several devices leaves its layers' outputs where they were computed
        return torch.cat([x.to(layers[-1].device) for x in layers], dim=-1) if len(layers) > 1 else layers[0]

    def clear(self) -> None:
        """Forget what was collected, as after forwards that are not the loop's (a processor that runs the target)."""
        self._outputs = [[] for _ in self._outputs]


set_up_deepseek_v4()
