"""What the plug-in's classes compute, inside SGLang's own modules on a CPU: `make test-sglang`.

Real are the draft model's layers, its file's loading, its context's keys and values, the sequential head and the loop
that drafts; of the target its class's forward around a body that is made up, and the logits processor; the registry
and the parser of configurations. Written out in torch is the attention kernel, made up are the caches. No engine runs.
"""

import json
import logging
from types import SimpleNamespace as Namespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_modules import Pool, TorchAttention, load, no_sync
from tiny_v4 import tiny_drafter, tiny_target
from transformers import AutoConfig

from hyperdflash.generation_hyperdflash import DraftRequest
from hyperdflash.pairing_hyperdflash import fingerprint_tensors, target_fingerprint
from hyperdflash.serving.sglang_format import cache_bytes
from hyperdflash.serving.vllm_format import NESTED
from hyperdflash.training.export import export_drafter, round_to_bf16

DRAFTERS = {
    "gate": {},
    "gate without path norm": {"reducer_path_norm": False},
    "mean": {"reducer": "mean"},
    "fc": {"reducer": "fc"},
    "sliding and full": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12},
    "head": {"draft_head": "markov", "markov_rank": 8},
    "gated head": {"draft_head": "markov", "markov_rank": 8, "markov_gate": True, "draft_confidence": True},
}
C, K, ANCHOR = 40, 4, 7
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def sglang():
    load()


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(params=DRAFTERS)
def made(request, target, tmp_path):
    """A drafter without a weight at its initial value, rounded as exported, and its folder."""
    drafter = tiny_drafter(target, **DRAFTERS[request.param])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            alpha = 0.5 if name.startswith("markov_head.") else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=alpha)
    drafter.save_pretrained(tmp_path / "drafter")
    folder = export_drafter(tmp_path / "drafter", tmp_path / "served", format="sglang")
    round_to_bf16(drafter)
    return drafter.float(), folder


only = pytest.mark.parametrize("made", ["gated head"], indirect=True)


@pytest.fixture
def draft(made):
    """SGLang builds it as it would from the folder, in fp32."""
    return build(made[1])


def build(folder):
    from sglang.srt.runtime_context import get_spec

    from hyperdflash_sglang.models.draft import DSparkHyperDraftModel

    with get_spec().override(speculative_num_draft_tokens=K):
        model = DSparkHyperDraftModel(AutoConfig.from_pretrained(folder))
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model


# -------------------------------------------------------------------------------------------------------- the draft


def block_states(model, residual, embeds) -> torch.Tensor:
    """Of one block behind the context `(C, m * D)`, by the calls that SGLang's worker makes."""
    for layer in model.layers:
        layer.self_attn.attn = TorchAttention(layer.self_attn.attn)
    pool, places = Pool(), torch.arange(C)
    with torch.no_grad():
        model.write_target_hidden_kv(target_hidden=residual, pool=pool, positions=places, cache_loc=places)
        return model(None, torch.arange(C, C + K), pool, input_embeds=embeds).hidden_states


def test_sglangs_layers_compute_the_drafters_states(made, draft):
    drafter, _ = made
    torch.manual_seed(2)
    residual, embeds = torch.randn(1, C, 2, 32), torch.randn(1, K, 32)
    with torch.no_grad():
        context = drafter.context_norm(drafter.reducer(residual))[0]
        output = drafter(embeds, context_hidden_states=residual, position_ids=torch.arange(C + K)[None])
    want, flat = output.last_hidden_state[0], residual[0].flatten(1)
    torch.testing.assert_close(draft.project_target_hidden(flat), context, **TOLERANCE)
    torch.testing.assert_close(block_states(draft, flat, embeds[0]), want, **TOLERANCE)


@pytest.mark.parametrize("made", ["sliding and full"], indirect=True)
def test_the_window_and_the_direction_inside_the_block_matter(made, draft):
    """The comparison above can fail."""
    torch.manual_seed(2)
    residual, embeds = torch.randn(C, 64), torch.randn(K, 32)
    states = block_states(draft, residual, embeds)
    for name, value in (("window", -1), ("causal", True)):
        other = build(made[1])
        changed = block_states(other, residual, embeds)
        torch.testing.assert_close(changed, states)
        for layer in other.layers:
            setattr(layer.self_attn.attn, name, value)
        with torch.no_grad():
            pool = Pool()
            other.write_target_hidden_kv(
                target_hidden=residual, pool=pool, positions=torch.arange(C), cache_loc=torch.arange(C)
            )
            changed = other(None, torch.arange(C, C + K), pool, input_embeds=embeds).hidden_states
        assert (changed - states).abs().max() > 1e-2


def test_sglangs_loop_drafts_from_the_drafters_logits(made, draft, target, monkeypatch):
    """By its own head, gated or not: without one, from the logits of the LM head."""
    from sglang.srt.speculative.dspark_components.dspark_draft import (
        DraftNoise,
        draft_markov_block,
        select_draft_hidden_without_anchor,
    )

    drafter, _ = made
    torch.manual_seed(3)
    states = torch.randn(K, 32)
    lm_head, rows = target.lm_head, []

    def choose(logits):
        rows.append(logits)
        return logits.argmax(-1)

    head = Namespace(weight=lm_head.weight, quant_method=None, org_vocab_size=64, tp_size=1)
    draft.attach_shared_modules(embed_tokens=target.model.embed_tokens, lm_head=head)
    with torch.no_grad():
        hidden, by_slot = select_draft_hidden_without_anchor(states, bs=1, gamma=draft.gamma)
        base, _ = draft.compute_base_logits(hidden)
        tokens, logits = draft_markov_block(
            markov_head=draft.markov_head,
            base_logits=base[None],
            anchor_tokens=torch.tensor([ANCHOR]),
            draft_hidden=by_slot,
            step_temperatures=torch.zeros(1),
            noise=DraftNoise(key=1, offset=torch.zeros(1, dtype=torch.int64)),
            tp_sync=no_sync(),
        )
        if drafter.markov_head is None:
            want = lm_head(states[1:])
        else:
            monkeypatch.setattr(drafter, "draft_hidden", lambda *args: (states[1:], None))
            noise_ids = torch.tensor([[ANCHOR] + [63] * (K - 1)])
            drafter.config.draft_confidence, drafter.confidence_head = False, None
            stand_in = Namespace(lm_head=lm_head, model=target.model)
            drafter.propose(DraftRequest(None, None, noise_ids, 0, K - 1, stand_in, cache=None), choose)
            want = torch.cat(rows)
            assert (want - base).abs().max() > 0.1
    torch.testing.assert_close(logits[0], want, atol=1e-4, rtol=1e-4)
    assert torch.equal(tokens[0], want.argmax(-1))


@only
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("reducer.hc_base"), "weights lack reducer.hc_base"),
        (lambda tensors: tensors.pop("layers.1.self_attn.q_proj.weight"), "weights lack layers.1.self_attn.q_proj"),
        (lambda tensors: tensors.update({"reducer.more": torch.zeros(1)}), "weights have an unknown reducer.more"),
    ],
)
def test_a_file_with_other_tensors_is_refused(made, edit, message):
    tensors = load_file(made[1] / "model.safetensors")
    edit(tensors)
    save_file(tensors, made[1] / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        build(made[1])


@only
@pytest.mark.parametrize("name", ["is_causal", "sliding_window"])
def test_layers_that_would_not_see_their_block_or_window_are_refused(made, name):
    config = json.loads((made[1] / "config.json").read_text())
    del config["is_causal"]
    if name == "sliding_window":
        config |= {"is_causal": False, "sliding_window": 32}
    (made[1] / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="layers got .* in place of"):
        build(made[1])


@only
def test_features_of_another_width_are_refused(draft):
    with pytest.raises(RuntimeError, match="got 32 features a token in place of its 64"):
        draft.project_target_hidden(torch.zeros(3, 32))


@only
def test_another_class_for_the_target_is_refused(made, monkeypatch):
    from sglang.srt.models import deepseek_v4
    from sglang.srt.models.registry import ModelRegistry

    monkeypatch.setitem(ModelRegistry.models, "DeepseekV4ForCausalLM", deepseek_v4.DeepseekV4ForCausalLM)
    with pytest.raises(ValueError, match="another class than the plug-in's serves the target, sglang.srt.models"):
        build(made[1])


# ------------------------------------------------------------------------------------------ the folder, as it is read


@only
def test_the_folder_is_a_dspark_draft_with_a_query_for_the_anchor(made, draft):
    from sglang.srt.speculative.dspark_components.dspark_config import (
        get_dspark_sample_from_anchor,
        parse_dspark_draft_config,
        resolve_runtime_config,
    )

    config = AutoConfig.from_pretrained(made[1])
    read = parse_dspark_draft_config(draft_hf_config=config)
    assert (read.gamma, read.mask_token_id, read.markov_rank, read.markov_head_type) == (K - 1, 63, 8, "gated")
    assert len(read.target_layer_ids) == draft.num_context_features == 2
    assert (draft.gamma, draft.sample_from_anchor) == (K - 1, get_dspark_sample_from_anchor(config)) == (3, False)
    run = resolve_runtime_config(draft_hf_config=config, speculative_num_draft_tokens=None, target_vocab_size=64)
    assert (run.gamma, run.verify_num_draft_tokens, run.mask_token_id) == (3, 4, 63)


@only
def test_more_drafts_than_the_drafter_was_trained_on_are_refused(made):
    from sglang.srt.runtime_context import get_spec

    from hyperdflash_sglang.models.draft import DSparkHyperDraftModel

    with (
        get_spec().override(speculative_num_draft_tokens=K + 1),
        pytest.raises(ValueError, match="4 drafts a round were asked for"),
    ):
        DSparkHyperDraftModel(AutoConfig.from_pretrained(made[1]))


# ------------------------------------------------------------------------------------------------------- the target


class Body(torch.nn.Module):
    """Stands for V4's layers: the states that `DeepseekV4Model.forward` returns, by the lines that the contract tests
    read."""

    late_layer_start = dspark_layers_to_capture = None

    def __init__(self):
        super().__init__()
        for name, size in (("hc_head_fn", (2, 64)), ("hc_head_base", (2,)), ("hc_head_scale", (1,))):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(size)))
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.randn(32))

    def forward(self, input_ids, *args):
        generator = torch.Generator().manual_seed(0)
        normed, residual = (torch.randn(len(input_ids), width, generator=generator) for width in (32, 64))
        if self.dspark_layers_to_capture is None:
            return normed, residual
        return (normed, residual), torch.zeros(len(input_ids), 32 * len(self.dspark_layers_to_capture))


def make_target(monkeypatch, drafter: dict | None):
    """The plug-in's class as SGLang builds it, but for V4's layers, which need a GPU's kernels."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
    from sglang.srt.models import deepseek_v4
    from sglang.srt.runtime_context import get_parallel

    from hyperdflash_sglang.models import target as module

    def init(self, config, quant_config=None, prefix=""):
        torch.nn.Module.__init__(self)
        self.config, self.pp_group, self.vision, self.model = config, get_parallel().pp_group, None, Body()
        self.capture_aux_hidden_states = False
        self.lm_head, self.logits_processor = ParallelLMHead(64, 32), LogitsProcessor(config)

    monkeypatch.setattr(deepseek_v4.DeepseekV4ForCausalLM, "__init__", init)
    monkeypatch.setattr(module, "served_drafter", lambda: drafter)
    sizes = {"vocab_size": 64, "hidden_size": 32, "hc_mult": 2, "num_hidden_layers": 3}
    return module.DeepseekV4ForCausalLM(Namespace(model_type="deepseek_v4", **sizes))


def run_target(model, mode: str) -> torch.Tensor:
    """What a worker that asks for every row's state is handed."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    ids = torch.arange(5)
    batch = ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=1,
        input_ids=ids,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.tensor([5]),
        out_cache_loc=ids,
        seq_lens_sum=5,
        positions=ids,
        extend_seq_lens=torch.tensor([5]),
        extend_seq_lens_cpu=[5],
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    with torch.no_grad():
        return model(ids, ids, batch).hidden_states


def capture(model) -> None:
    """What a runner does with a DSPARK draft's `target_layer_ids`."""
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        configure_aux_hidden_state_capture,
    )

    configure_aux_hidden_state_capture(
        model=model,
        eagle_use_aux_hidden_state=False,
        eagle_aux_hidden_state_layer_ids=None,
        dflash_use_aux_hidden_state=True,
        dflash_target_layer_ids=[2, 2],
        is_dspark=True,
    )


@pytest.fixture
def nested(made):
    return getattr(AutoConfig.from_pretrained(made[1]), NESTED)


@only
@pytest.mark.parametrize("mode", ["EXTEND", "TARGET_VERIFY"])
def test_a_worker_is_handed_all_paths_of_every_row(monkeypatch, nested, mode):
    model = make_target(monkeypatch, nested)
    _, residual = model.model(torch.arange(5))
    capture(model)
    assert torch.equal(run_target(model, mode), residual)


@pytest.mark.parametrize("mode", ["EXTEND", "TARGET_VERIFY"])
def test_another_draft_is_handed_what_it_asked_for(monkeypatch, mode):
    model = make_target(monkeypatch, None)
    capture(model)
    assert model.model.dspark_layers_to_capture == [2, 2]
    assert torch.equal(run_target(model, mode), torch.zeros(5, 64))


@only
def test_a_target_of_other_sizes_is_refused_before_it_is_built(monkeypatch, nested):
    with pytest.raises(ValueError, match="vocabulary 65, but the target has 64"):
        make_target(monkeypatch, nested | {"vocab_size": 65})


@only
def test_the_target_is_compared_when_its_weights_are_first_loaded(monkeypatch, nested, target):
    from sglang.srt.models import deepseek_v4

    monkeypatch.setattr(deepseek_v4.DeepseekV4ForCausalLM, "load_weights", lambda self, weights, is_nextn: "loaded")
    fingerprint = target_fingerprint(fingerprint_tensors(target))
    model = make_target(monkeypatch, nested | {"target_fingerprint": fingerprint})
    with pytest.raises(ValueError, match="made for another target .*: hc_head_fn differs"):
        model.load_weights([])
    model = make_target(monkeypatch, nested | {"target_fingerprint": fingerprint})
    head = target.model.hc_head
    ours = {"hc_head_fn": head.hc_fn, "hc_head_base": head.hc_base, "hc_head_scale": head.hc_scale}
    for name, tensor in ours.items():
        getattr(model.model, name).data = tensor.data
    model.model.norm.weight.data = target.model.norm.weight.data
    assert model.load_weights([]) == "loaded"
    model.model.norm.weight.data = model.model.norm.weight.data * 2  # weights that come while it serves
    assert model.load_weights([]) == "loaded"


@only
def test_the_target_learns_of_the_drafter_from_the_servers_options(made):
    from sglang.srt.runtime_context import get_spec

    from hyperdflash_sglang.models.target import served_drafter

    assert served_drafter() is None
    with get_spec().override(speculative_draft_model_path=str(made[1])):
        assert served_drafter()["block_size"] == K


# ----------------------------------------------------------------------------------------------------- the registry


def registered(monkeypatch, models: dict) -> dict:
    """SGLang's registry after the entry point was called."""
    from sglang.srt.models import registry

    import hyperdflash_sglang

    known = registry._ModelRegistry(models=models)
    monkeypatch.setattr(registry, "ModelRegistry", known)
    hyperdflash_sglang.register()
    hyperdflash_sglang.register()
    return known.models


def test_the_entry_point_registers_both_classes_in_place_of_sglangs_own(monkeypatch):
    from sglang.srt.models import deepseek_v4

    from hyperdflash_sglang.models.draft import DSparkHyperDraftModel
    from hyperdflash_sglang.models.target import DeepseekV4ForCausalLM

    own = {"DeepseekV4ForCausalLM": deepseek_v4.DeepseekV4ForCausalLM, "Qwen3ForCausalLM": int}
    ours = {"DeepseekV4ForCausalLM": DeepseekV4ForCausalLM, "DSparkHyperDraftModel": DSparkHyperDraftModel}
    assert registered(monkeypatch, dict(own)) == own | ours
    with pytest.raises(ValueError, match="folder for transformers"):
        AutoConfig.for_model("hyperdflash")


def test_another_packages_class_for_v4_is_left_alone(monkeypatch, caplog):
    class DeepseekV4ForCausalLM: ...

    with caplog.at_level(logging.WARNING):
        models = registered(monkeypatch, {"DeepseekV4ForCausalLM": DeepseekV4ForCausalLM})
    assert models == {"DeepseekV4ForCausalLM": DeepseekV4ForCausalLM}
    assert "hyperdflash-sglang does nothing: DeepSeek-V4 is served by" in caplog.text


# --------------------------------------------------------------------------------------------------- what it costs


def test_what_sglang_sets_aside_for_a_token_of_v4_flash_and_how_many_drafts_it_serves():
    """Its own arithmetic, without the class's set-up: 3,899 bytes, and one layer in 43 for any draft. The default
    drafter's cache, 5,120 at four ranks, is not in it."""
    from sglang.srt.model_executor import pool_configurator as pools
    from sglang.srt.runtime_context import get_spec

    sizes = object.__new__(pools.DSV4PoolConfigurator)
    ratios = [0, 0] + [4, 128] * 20 + [4]
    owners = {ratio: [i for i, r in enumerate(ratios) if r == ratio] for ratio in (4, 128)}
    with get_spec().override(speculative_algorithm="DSPARK", speculative_num_draft_tokens=7):
        rings = {ratio: pools.resolve_compress_state_ring_size(ratio) for ratio in owners}
    values = {
        "kv_bytes": 448 + 64 * 2 + 8,
        "page_size": 256,
        "c4_shrink_factor": 1,
        "indexer_bytes_per_token": pools.get_dsv4_indexer_bytes_per_token(128, False),
        "stage_owner_layers": owners,
        "ring_sizes": rings,
        "swa_cap_tokens": 1,  # the window's rows are counted apart, by request
        "bytes_per_swa_token": 0,
        "_unified": False,
    }
    vars(sizes).update(values)
    assert sizes._get_bytes_per_full_token() == pytest.approx(3899.25)
    # Ten rows fit: nine drafts and the anchor
    sizes._assert_ring_serves_draft_tokens(10)
    with pytest.raises(AssertionError, match="serves at most 10 draft tokens"):
        sizes._assert_ring_serves_draft_tokens(11)
    from hyperdflash.configuration_hyperdflash import HyperDFlashConfig

    config = HyperDFlashConfig(num_hidden_layers=5, num_key_value_heads=8, head_dim=128)
    assert cache_bytes(config) == 20_480


@only
def test_the_log_says_what_the_drafters_cache_takes(made, caplog):
    with caplog.at_level(logging.WARNING):
        build(made[1])
    assert "The drafter's cache takes 128 bytes a token on each GPU in bf16" in caplog.text
