"""A random DeepSeek-V4 small enough for hundreds of runs, and drafters for it.

Matrices have a standard deviation of 0.15, so that logits are not flat. `index_topk` exceeds the compressed
entries these tests reach: with fewer, ReLU scores of a random indexer tie exactly and even one-token decoding differs
from a full forward.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.generation.dspark import SETTINGS, DeepseekV4DSpark
from hyperdflash.modeling_hyperdflash import HyperDFlashModel


def nightly(*values):
    """One more case of a parametrized test: `make test` leaves it out, `make nightly` runs it."""
    return pytest.param(*values, marks=pytest.mark.nightly)


SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
MIXED = (SLIDING, CSA, HCA)
VOCAB_SIZE, MASK_TOKEN_ID = 64, 63


def tiny_config(
    layer_types=MIXED, *, window=8, csa=4, hca=8, hidden_size=32, hc_mult=2, vocab_size=VOCAB_SIZE, **kwargs
):
    """The random target's config; the first layer's MoE is hash-routed."""
    defaults = {
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "head_dim": 16,
        "q_lora_rank": 16,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "partial_rotary_factor": 0.5,
        "num_hash_layers": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": 512,
        "hc_sinkhorn_iters": 3,
        "initializer_range": 0.15,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        compress_rates={CSA: csa, HCA: hca},
        sliding_window=window,
        hc_mult=hc_mult,
        **{**defaults, **kwargs},
    )


def tiny_target(layer_types=MIXED, *, seed=0, **kwargs) -> DeepseekV4ForCausalLM:
    """A random target in eval mode with filled hash tables."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(tiny_config(layer_types, **kwargs)).eval()
    for layer in model.model.layers:
        if layer.mlp.is_hash:
            table = layer.mlp.gate.tid2eid
            table.copy_(torch.rand(table.shape[0], layer.mlp.gate.num_experts).topk(table.shape[1]).indices)
        if layer.self_attn.compressor is not None:
            torch.nn.init.normal_(layer.self_attn.compressor.position_bias, std=0.5)
    return model


def record_drafts(drafter, monkeypatch) -> list[tuple[torch.LongTensor, list[torch.Tensor]]]:
    """Filled while the drafter decodes: of every round the ids so far `(1, T)`, and the logits of its drafts."""
    rounds, own = [], drafter.propose

    def recording(request, choose):
        drafts = []

        def choose_and_keep(logits):
            drafts.append(logits)
            return choose(logits).clone()

        own(request, choose_and_keep)
        rounds.append((request.ids.clone(), drafts))

    monkeypatch.setattr(drafter, "propose", recording)
    return rounds


def random_ids(length: int, *, seed=0, vocab_size=VOCAB_SIZE - 1) -> torch.LongTensor:
    """A prompt of shape (1, length) without the mask token."""
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def tiny_drafter_config(target, *, block_size=4, context_source="pre_hc_head", **kwargs) -> HyperDFlashConfig:
    """A small drafter's config for `target`; tapped layers need `reducer="fc"`, which is then the default."""
    config = target.config
    defaults = {
        "mask_token_id": config.vocab_size - 1,
        "reducer": "hc_gate" if context_source == "pre_hc_head" else "fc",
        "hidden_size": config.hidden_size,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
    }
    return HyperDFlashConfig(
        block_size=block_size,
        context_source=context_source,
        hc_mult=config.hc_mult,
        target_hidden_size=config.hidden_size,
        target_num_hidden_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        **{**defaults, **kwargs},
    )


def tiny_drafter(target, *, seed=1, **kwargs) -> HyperDFlashModel:
    """A random drafter in eval mode: real drafts, nearly all of them wrong."""
    torch.manual_seed(seed)
    return HyperDFlashModel(tiny_drafter_config(target, **kwargs)).eval()


def tiny_dspark(target, *, block_size=5, target_layer_ids=None, num_stages=2, seed=2) -> DeepseekV4DSpark:
    """A random DSpark module, which reads the last layers: real drafts, nearly all of them wrong."""
    torch.manual_seed(seed)
    number = target.config.num_hidden_layers
    settings = {
        "dspark_block_size": block_size,
        "dspark_target_layer_ids": target_layer_ids or list(range(number))[-2:],
        "dspark_noise_token_id": target.config.vocab_size - 1,
        "dspark_markov_rank": 4,
    }
    return DeepseekV4DSpark(DeepseekV4Config(**{**target.config.to_dict(), **settings}), num_stages).eval()


def save_dspark(dspark, folder, *, dtype=torch.float32, **changes):
    """The module alone, in the official naming, with its settings; `changes` replace tensors, or drop them (None)."""
    tensors = {**dspark.official_state_dict(dtype), **changes}
    folder.mkdir(exist_ok=True)
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    settings = {name: getattr(dspark.config, name) for name in SETTINGS}
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **settings}))
    return folder


ALWAYS = 1000


class ScriptedDrafter(HyperDFlashModel):
    """A drafter that proposes what a script says; only `draft` is replaced, so everything else is the real thing.

    Its logits are a point mass on each proposed id. `rounds` counts its calls since the last `follow`.
    """

    def follow(self, sequence: torch.LongTensor, pattern: int | None | Callable[[int], int | None], *, pads: int = 0):
        """Draft from `sequence` `(1, T)`: prompt and continuation, `pads` of it left padding.

        `pattern`, or `pattern(round)`, is the number of leading drafts that are right (the next one is wrong, the ones
        behind it right again), or None for no draft at all. Behind the end of `sequence` any id is "right".
        """
        self.sequence, self.pads, self.rounds = sequence[0].tolist(), pads, 0
        self.pattern = pattern if callable(pattern) else lambda _: pattern
        return self

    def draft(self, request):
        right = self.pattern(self.rounds)
        self.rounds += 1
        start, num_drafts = request.position + self.pads + 1, request.num_drafts
        ids = (self.sequence[start : start + num_drafts] + [1] * num_drafts)[: num_drafts if right is not None else 0]
        if right is not None and right < len(ids):
            ids[right] = (ids[right] + 1) % (self.config.vocab_size - 1)
        logits = torch.full((len(ids), self.config.vocab_size), float("-inf"), device=request.noise_ids.device)
        logits[range(len(ids)), ids] = 0.0
        return logits


def scripted_drafter(target, sequence=None, pattern=ALWAYS, **kwargs) -> ScriptedDrafter:
    """Always right (`ALWAYS`, the default), never (0), the first j (j), None (empty), or a function of the round."""
    torch.manual_seed(1)
    drafter = ScriptedDrafter(tiny_drafter_config(target, **kwargs)).eval()
    return drafter if sequence is None else drafter.follow(sequence, pattern)


def greedy(target, prompt, max_new_tokens, **kwargs):
    """Plain or assisted greedy decoding."""
    return target.generate(prompt, do_sample=False, max_new_tokens=max_new_tokens, **kwargs)


def states(layer) -> dict[str, torch.Tensor | int]:
    """Every tensor and counter reachable from a cache layer, except the rewind record; empty tensors as absent."""
    found = {}

    def walk(name, value):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{name}.{key}", item)
        elif value.numel() if isinstance(value, torch.Tensor) else type(value) is int:
            found[name] = value

    for name, value in vars(layer).items():
        if name not in ("num_recorded", "_rows", "_first_entry", "_slices", "_sliding_window_tensor"):
            walk(name, value)
    return found


def assert_same_state(cache, fresh, tolerance=1e-5):
    """Two caches hold the same positions, entries, buffers and counters."""
    for layer, expected in zip(cache.layers, fresh.layers, strict=True):
        got, want = states(layer), states(expected)
        assert got.keys() == want.keys()
        for name, value in want.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(got[name], value, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
            else:
                assert got[name] == value, name
    assert len({cache.get_seq_length(i) for i in range(len(cache.layers))}) == 1


PATTERNS = {
    "always": ALWAYS,
    "never": 0,
    "first two": 2,
    "empty": None,
    "mixed": lambda r: (0, None, ALWAYS, 1)[r % 4],
}
FAST = ("always", "first two", "mixed")  # the others take one forward per token, and "mixed" has their rounds too


def assert_lossless(target, prompt, want, sequence=None, *, patterns=FAST, block_size=4, pads=0, **kwargs):
    """Greedy decoding gives the ids `want` with drafters that follow `sequence` (by default `want`) in some patterns.

    `kwargs` are `generate`'s; a callable among them named `fresh` makes more of them, anew for every call.
    """
    fresh = kwargs.pop("fresh", dict)
    for name in patterns:
        drafter = scripted_drafter(target, block_size=block_size)
        drafter.follow(want if sequence is None else sequence, PATTERNS[name], pads=pads)
        got = target.generate(prompt, do_sample=False, assistant_model=drafter, **kwargs, **fresh())
        assert got.tolist() == want.tolist(), name


TINY_WORLD_TARGET = Path(__file__).parents[1] / "examples" / "tiny" / "target"


def features_recipe(folder: Path, more: str = "") -> Path:
    """A recipe in `folder`, with `more` lines, for the example's target and three samples, one for evaluation."""
    lines = [json.dumps({"input_ids": [0, *range(10, 10 + n)], "loss_mask": [0] + [1] * n}) for n in (6, 9, 4)]
    (folder / "train.jsonl").write_text("\n".join(lines[:2]))
    (folder / "eval.jsonl").write_text(lines[2])
    path = folder / "recipe.yaml"
    path.write_text(
        f"target: {TINY_WORLD_TARGET}\noutput_dir: {folder / 'run'}\nfeatures_dir: {folder / 'features'}\n"
        f"train_data: [{folder / 'train.jsonl'}]\neval_data: [{folder / 'eval.jsonl'}]\n"
        f"drafter: {{mask_token_id: 3, num_hidden_layers: 1}}\nuse_cpu: true\n{more}"
    )
    return path
