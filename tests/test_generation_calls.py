"""Around an assisted call: the set-up of the target class, refusals, other assistants, and nothing left behind."""

import contextlib
import copy
import gc
import importlib.util
import inspect
import json
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from fresh import run_fresh
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny_v4 import (
    ALWAYS,
    CSA,
    HCA,
    PATTERNS,
    SLIDING,
    TINY_WORLD_TARGET,
    assert_lossless,
    assert_same_state,
    greedy,
    nightly,
    random_ids,
    scripted_drafter,
    tiny_drafter,
    tiny_target,
)
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache, pipeline
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation import (
    BaseStreamer,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACache,
    DeepseekV4ForCausalLM,
    DeepseekV4HCACache,
)

import hyperdflash.generation_hyperdflash as generation
import hyperdflash.target_hyperdflash as target_module
from hyperdflash.generation.mtp import DeepseekV4MTP
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.pairing_hyperdflash import fingerprint_tensors, target_fingerprint
from hyperdflash.target_hyperdflash import RewindableSlidingLayer, make_rewindable, set_up_deepseek_v4
from hyperdflash.training.init import init_drafter
from hyperdflash.training.target import TargetHead

PROMPT_LENGTH = 10
SEAMS = ("_assisted_decoding", "_validate_generation_mode", "_prepare_cache_for_generation")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def prompt():
    return random_ids(PROMPT_LENGTH)


@pytest.fixture(scope="module")
def plain(target, prompt):
    """What the target says, without a stop: prompt and 40 tokens."""
    return greedy(target, prompt, 40)


def footprint(model):
    """Everything a call could leave on a model: hooks, attributes, configs."""
    return {
        "hooks": [
            (name, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ],
        "attributes": [(name, sorted(vars(module))) for name, module in model.named_modules()],
        "config": copy.deepcopy(vars(model.config)),
        "generation config": copy.deepcopy(vars(model.generation_config)) if model.can_generate() else None,
        "class": {name: vars(type(model)).get(name) for name in (*SEAMS, "_is_stateful", "forward", "generate")},
        "training": [module.training for module in model.modules()],
    }


# ------------------------------------------------------------------------------------------------------------- set-up

SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
target_folder, drafter_folder, prompt = sys.argv[1], sys.argv[2], torch.tensor([json.loads(sys.argv[3])])
def load_target():
    return AutoModelForCausalLM.from_pretrained(target_folder)
{body}
ids = [target.generate(prompt, do_sample=False, max_new_tokens=12, **kw)[0].tolist()
       for kw in ({{}}, {{"assistant_model": drafter}}, {{"prompt_lookup_num_tokens": 3}})]
print(json.dumps(ids))
"""
TARGET_FIRST = """
target = load_target()
before = target.generate(prompt, do_sample=False, max_new_tokens=12)[0].tolist()
try:
    target.generate(prompt, do_sample=False, max_new_tokens=12, prompt_lookup_num_tokens=3)
except ValueError as error:
    assert "stateful" in str(error)
else:
    raise AssertionError("DeepSeek-V4 takes assistants without the set-up: this test proves nothing")
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
drafter = HyperDFlashModel.from_pretrained(drafter_folder)
assert target.generate(prompt, do_sample=False, max_new_tokens=12)[0].tolist() == before
"""
DRAFTER_FIRST = """
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
drafter = HyperDFlashModel.from_pretrained(drafter_folder)
target = load_target()
"""


@pytest.mark.slow
@pytest.mark.parametrize("body", [TARGET_FIRST, DRAFTER_FIRST], ids=["target first", "drafter first"])
def test_either_order_of_loading_works_in_a_fresh_process(target, prompt, tmp_path, body):
    """Also for a target that was built, and has generated, before the package was imported."""
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    arguments = [tmp_path / "target", tmp_path / "drafter", json.dumps(prompt[0].tolist())]
    printed = run_fresh(SCRIPT.format(body=body), tmp_path, *arguments, cwd=tmp_path, path=sys.path)
    assert json.loads(printed.splitlines()[-1]) == [greedy(target, prompt, 12)[0].tolist()] * 3


def test_set_up_twice_changes_nothing():
    before = {name: inspect.getattr_static(DeepseekV4ForCausalLM, name) for name in (*SEAMS, "_is_stateful")}
    set_up_deepseek_v4()
    after = {name: inspect.getattr_static(DeepseekV4ForCausalLM, name) for name in (*SEAMS, "_is_stateful")}
    assert before == after
    assert before["_is_stateful"]  # the class refuses whatever else a stateful model is refused


def test_two_copies_of_the_package_in_one_process_both_work(target, prompt, plain, monkeypatch):
    """As when two drafters bring their code from the Hub. https://github.com/huggingface/transformers/issues/45698"""
    root = Path(generation.__file__).parent
    spec = importlib.util.spec_from_file_location(
        "hyperdflash_copy", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    package = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hyperdflash_copy", package)
    spec.loader.exec_module(package)
    before = [vars(DeepseekV4ForCausalLM)[name] for name in SEAMS]
    modeling = importlib.import_module("hyperdflash_copy.modeling_hyperdflash")
    assert [vars(DeepseekV4ForCausalLM)[name] for name in SEAMS] == before
    ours = tiny_drafter(target)
    other = modeling.HyperDFlashModel(modeling.HyperDFlashConfig(**ours.config.to_dict())).eval()
    assert type(other) is not type(ours)
    other.load_state_dict(ours.state_dict())
    cache = DynamicCache(config=target.config)
    for drafter in (ours, other, ours):
        got = greedy(target, prompt, 12, assistant_model=drafter)
        assert got.tolist() == plain[:, :22].tolist()
    for drafter, length in ((other, 15), (ours, 18), (other, 21)):  # one cache in turns
        got = greedy(target, plain[:, :length], 2, assistant_model=drafter, cache=cache)
        assert got.tolist() == plain[:, : length + 2].tolist()


def restored_v4(monkeypatch):
    """`DeepseekV4ForCausalLM` as the library ships it, until the test ends."""
    for name in SEAMS:
        monkeypatch.delattr(DeepseekV4ForCausalLM, name)


@pytest.mark.parametrize("name", [*SEAMS, "_prefill"])
@pytest.mark.parametrize("change", ["gone", "renamed argument"])
def test_moved_seam_is_one_error_that_names_the_tested_versions(monkeypatch, name, change):
    """And the target class stays as it was."""
    restored_v4(monkeypatch)
    if change == "gone":
        monkeypatch.delattr(GenerationMixin, name)
    else:
        monkeypatch.setattr(GenerationMixin, name, lambda self, something_else: None)
    with pytest.raises(ImportError, match=rf"lacks .*GenerationMixin\.{name}.*; tested versions: 5\.24\.0"):
        set_up_deepseek_v4()
    assert not set(SEAMS) & set(vars(DeepseekV4ForCausalLM))
    assert DeepseekV4ForCausalLM._is_stateful is True


@pytest.mark.slow
def test_moved_seam_is_that_error_at_import_too(tmp_path):
    """In a fresh process, where nothing was set up before."""
    script = """
from transformers.generation import GenerationMixin
del GenerationMixin._assisted_decoding
try:
    from hyperdflash.modeling_hyperdflash import HyperDFlashModel
except ImportError as error:
    assert "lacks what HyperDFlash builds on: GenerationMixin._assisted_decoding(" in str(error), error
    assert "tested versions: 5.24.0" in str(error), error
else:
    raise AssertionError("imported without what it builds on")
"""
    run_fresh(script, tmp_path, cwd=tmp_path, path=sys.path)


def test_set_up_of_a_restored_class_works(monkeypatch, target, prompt, plain):
    restored_v4(monkeypatch)
    with pytest.raises(ValueError, match="stateful"):
        greedy(target, prompt, 5, prompt_lookup_num_tokens=3)
    set_up_deepseek_v4()
    assert greedy(target, prompt, 12, assistant_model=tiny_drafter(target)).tolist() == plain[:, :22].tolist()
    monkeypatch.undo()
    assert greedy(target, prompt, 12, assistant_model=tiny_drafter(target)).tolist() == plain[:, :22].tolist()


def test_plain_generation_uses_the_librarys_layers_and_ids(target, prompt, monkeypatch):
    got = greedy(target, prompt, 12, return_dict_in_generate=True)
    assert [type(layer) for layer in got.cache.layers] == [
        DynamicSlidingWindowLayer,
        DeepseekV4CSACache,
        DeepseekV4HCACache,
    ]
    assert not any(layer.record_past for layer in got.cache.layers)
    restored_v4(monkeypatch)
    assert greedy(target, prompt, 12).tolist() == got.sequences.tolist()


# --------------------------------------------------------------------------------------------------- other assistants


def llama(target):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "assistant",
    [
        lambda target: {"prompt_lookup_num_tokens": 3},
        lambda target: {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1},
        lambda target: {"assistant_model": tiny_target(seed=7)},
        lambda target: {"assistant_model": tiny_target((SLIDING, CSA), seed=8, window=3, hidden_size=64)},
        lambda target: {"assistant_model": tiny_target()},
        lambda target: {"assistant_model": llama(target)},
    ],
    ids=["prompt lookup", "long prompt lookup", "random V4", "other V4", "the target itself", "another model"],
)
def test_prompt_lookup_and_ordinary_assistants_work(target, prompt, plain, assistant):
    """Refused before the set-up; the cache they return goes on, also with a drafter.

    https://github.com/huggingface/transformers/pull/45643
    """
    out = greedy(target, prompt, 24, return_dict_in_generate=True, **assistant(target))
    assert out.sequences.tolist() == plain[:, :34].tolist()
    assert out.cache.get_seq_length() == 33
    assert not any(layer.record_past for layer in out.cache.layers)
    assert all(isinstance(layer, RewindableSlidingLayer) for layer in out.cache.layers)
    repeated = torch.cat([plain[:, :34], plain[:, 3:20]], dim=1)
    want = greedy(target, repeated, 12)
    for options in ({"assistant_model": tiny_drafter(target)}, {}):
        got = greedy(target, repeated, 12, cache=copy.deepcopy(out.cache), **options)
        assert got.tolist() == want.tolist()
    assert greedy(target, repeated, 12, **assistant(target)).tolist() == want.tolist()


# ----------------------------------------------------------------------------------------------------------- refusals


def assert_refused(target, prompt, drafter, match, **options):
    """One `ValueError` that says why, no drafter forward, nothing left behind, and the next call works."""
    before = footprint(target), footprint(drafter)
    calls = []
    handle = drafter.register_forward_pre_hook(lambda *args: calls.append(1))
    options = {"do_sample": False, "max_new_tokens": 8, **options}
    with pytest.raises(ValueError, match=match):
        target.generate(prompt, assistant_model=drafter, **options)
    handle.remove()
    assert not calls
    assert (footprint(target), footprint(drafter)) == before


def test_batch_larger_than_one_is_refused(target, prompt, plain):
    """https://github.com/huggingface/transformers/issues/29769"""
    drafter = tiny_drafter(target)
    for batch in (2, 5):
        ids = torch.cat([random_ids(5, seed=seed) for seed in range(batch)])
        assert_refused(target, ids, drafter, f"batch size 1, got {batch} prompts")
    assert greedy(target, prompt, 8, assistant_model=drafter).tolist() == plain[:, :18].tolist()


def test_options_that_a_drafter_cannot_honour_are_refused(target, prompt, plain):
    """Beams, several sequences, and other ways to draft: none is silently dropped.

    https://github.com/deepspeedai/DeepSpeed/pull/2627
    """
    drafter = tiny_drafter(target)
    for match, options in (
        ("[Bb]eam|assist", {"num_beams": 4}),
        ("[Bb]eam|assist", {"num_beams": 2, "do_sample": True}),
        ("num_return_sequences=3: a drafter decodes one", {"num_return_sequences": 3, "do_sample": True}),
        ("prompt_lookup_num_tokens=3", {"prompt_lookup_num_tokens": 3}),
        ("assistant_early_exit=1", {"assistant_early_exit": 1}),
        ("synced_gpus", {"synced_gpus": True}),
    ):
        assert_refused(target, prompt, drafter, match, **options)
    assert greedy(target, prompt, 8, assistant_model=drafter).tolist() == plain[:, :18].tolist()


def test_embeddings_instead_of_ids_are_refused(target, prompt):
    """Hash-routed layers need ids; they never get zeros in place of them.

    https://github.com/NVIDIA/TensorRT-LLM/pull/13442
    """
    embeds = target.get_input_embeddings()(prompt).detach()
    drafter = tiny_drafter(target)
    assert_refused(target, None, drafter, "hash-routed layers need token ids", inputs_embeds=embeds)
    assert_refused(target, prompt, drafter, "hash-routed layers need token ids", inputs_embeds=embeds)


def test_cache_switched_off_is_refused(target, prompt, plain, monkeypatch):
    """For the call, in a generation config, and in the target's. https://github.com/huggingface/blog/issues/1146"""
    drafter = tiny_drafter(target)
    assert_refused(target, prompt, drafter, "set use_cache=True", use_cache=False)
    config = GenerationConfig(use_cache=False, do_sample=False, max_new_tokens=8)
    with pytest.raises(ValueError, match="set use_cache=True"):
        target.generate(prompt, generation_config=config, assistant_model=drafter)
    with monkeypatch.context() as patch:
        patch.setattr(target.generation_config, "use_cache", False)
        assert_refused(target, prompt, drafter, "set use_cache=True")
        got = greedy(target, prompt, 8, assistant_model=drafter, use_cache=True)
        assert got.tolist() == plain[:, :18].tolist()
    with monkeypatch.context() as patch:
        patch.setattr(target.config, "use_cache", False, raising=False)
        assert greedy(target, prompt, 8, assistant_model=drafter).tolist() == plain[:, :18].tolist()
    unset = GenerationConfig(use_cache=None, do_sample=False, max_new_tokens=8)
    got = target.generate(prompt, generation_config=unset, assistant_model=drafter)
    assert got.tolist() == plain[:, :18].tolist()


@pytest.mark.parametrize("implementation", ["static", "offloaded_static", "quantized", "offloaded"])
def test_caches_that_cannot_rewind_are_refused_by_name(target, prompt, implementation):
    """https://github.com/huggingface/transformers/pull/45745"""
    drafter = tiny_drafter(target)
    assert_refused(
        target, prompt, drafter, f"cache_implementation='{implementation}'", cache_implementation=implementation
    )


def test_cache_objects_that_cannot_rewind_are_refused_by_name(target, prompt, plain):
    """https://github.com/huggingface/transformers/pull/45745"""
    drafter = tiny_drafter(target)
    static = StaticCache(config=tiny_target((SLIDING,)).config, max_cache_len=64)
    assert_refused(target, prompt, drafter, "got a StaticCache", cache=static)
    foreign = DynamicCache(config=tiny_target((SLIDING, SLIDING)).config)
    assert_refused(target, prompt, drafter, "2 layers, DeepSeek-V4's config has 3", cache=foreign)
    assert_refused(target, prompt, drafter, "cannot make a DynamicLayer|has 0 layers", cache=DynamicCache())
    for options in ({"cache_implementation": "dynamic"}, {}):
        assert greedy(target, prompt, 8, assistant_model=drafter, **options).tolist() == plain[:, :18].tolist()


def test_drafter_made_for_another_target_is_refused_with_both_numbers(target, prompt, plain, caplog):
    """Another name alone is no reason. https://github.com/ggml-org/llama.cpp/pull/3812"""
    drafter = tiny_drafter(target, target_name_or_path="some/other-target")
    for other, match in (
        (tiny_target(vocab_size=80), "vocabulary 64, but the target has 80"),
        (tiny_target(hidden_size=48), "hidden size 32, but the target has 48"),
        (tiny_target(hc_mult=4), "hc_mult 2, but the target has 4"),
        (tiny_target((SLIDING, CSA)), "number of layers 3, but the target has 2"),
    ):
        assert_refused(other, prompt, drafter, match)
    assert greedy(target, prompt, 8, assistant_model=drafter).tolist() == plain[:, :18].tolist()
    assert not caplog.records


def test_drafter_that_could_not_draft_is_refused(target, prompt, monkeypatch):
    """No mask token of its own, no weights. https://github.com/charlie12345/ROCmFPX/issues/44"""
    with torch.device("meta"):
        meta = tiny_drafter(target)
    assert_refused(target, prompt, meta, "no weights")
    drafter = tiny_drafter(target, mask_token_id=9)
    for name, value in (("eos_token_id", 9), ("eos_token_id", [3, 9]), ("bos_token_id", 9), ("pad_token_id", 9)):
        with monkeypatch.context() as patch:
            patch.setattr(target.config, name, value)
            assert_refused(target, prompt, drafter, f"mask_token_id 9 is the target's {name}")


def test_fingerprint_of_another_target_warns_once(target, prompt, plain, caplog):
    """The target it was made for is silent, in bf16 too; another one of the same sizes is named at the first call.

    https://github.com/ggml-org/llama.cpp/pull/3812
    """
    other = tiny_target(seed=5)
    for model, expected in ((target, 0), (tiny_target().bfloat16(), 0), (other, 1)):
        caplog.clear()
        fingerprint = target_fingerprint(fingerprint_tensors(target))
        drafter = tiny_drafter(target, target_fingerprint=fingerprint, target_name_or_path="made/for-this")
        for _ in range(2):
            greedy(model, prompt, 3, assistant_model=drafter)
        lines = [line for line in caplog.messages if "made for another target (made/for-this)" in line]
        assert len(lines) == expected
        assert all(name in line for line in lines for name in ("hc_head_fn", "embed.weight"))


# ------------------------------------------------------------------------------------------------ nothing left behind


def test_calls_change_no_setting_and_repeat_themselves(target, prompt, plain):
    """Four different calls, each twice. https://github.com/huggingface/transformers/pull/28759"""
    greedy(target, prompt, 2, output_hidden_states=True, return_dict_in_generate=True)  # the library's hooks stay
    drafter = scripted_drafter(target)
    before = footprint(target), footprint(drafter)
    user_config = GenerationConfig(max_new_tokens=14, do_sample=False, num_assistant_tokens=2)
    user_before = copy.deepcopy(vars(user_config))
    for options in (
        {"max_new_tokens": 20, "do_sample": False},
        {"generation_config": user_config},
        {"max_new_tokens": 9, "do_sample": False, "repetition_penalty": 1.2, "output_hidden_states": True},
        {"max_new_tokens": 9, "do_sample": True, "top_k": 5, "temperature": 0.7},
    ):
        rounds = []
        for _ in range(2):
            torch.manual_seed(0)
            drafter.follow(plain, PATTERNS["mixed"])
            out = target.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
            rounds.append((out.speculation.num_drafts, out.speculation.num_accepted, out.sequences.tolist()))
        assert rounds[0] == rounds[1]
        for name in ("sequence", "pads", "rounds", "pattern"):  # the script's own
            delattr(drafter, name)
        assert (footprint(target), footprint(drafter)) == before
    assert vars(user_config) == user_before


class Bomb:
    """Goes off at its third call."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def tick(self):
        self.calls += 1
        if self.calls == 3:
            raise self.error


class BombProcessor(Bomb, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.tick()
        return scores


class BombCriterion(Bomb, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.tick()
        return torch.zeros(1, dtype=torch.bool)


class BombStreamer(Bomb, BaseStreamer):
    def put(self, value):
        self.tick()

    def end(self):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("context_source", ["pre_hc_head", "hidden_layers"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["exception", "keyboard interrupt"])
@pytest.mark.parametrize("place", ["draft", "target", "processor", "criterion", "streamer"])
def test_interruption_anywhere_leaves_nothing_behind(target, prompt, plain, place, error, context_source):
    """No hook, attribute or setting on the models; the user's cache records no longer; the next call is right."""
    taps = {"target_layer_ids": [0, 2]} if context_source == "hidden_layers" else {}
    drafter = tiny_drafter(target, context_source=context_source, **taps)
    before = footprint(target), footprint(drafter)
    cache = DynamicCache(config=target.config)
    options, undo, bomb = {"cache": cache}, lambda: None, Bomb(error)
    if place == "draft":
        undo = drafter.register_forward_hook(lambda *args: bomb.tick()).remove
    elif place == "target":
        undo = target.model.layers[1].register_forward_hook(lambda *args: bomb.tick()).remove
    elif place == "processor":
        options["logits_processor"] = LogitsProcessorList([BombProcessor(error)])
    elif place == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([BombCriterion(error)])
    else:
        options["streamer"] = BombStreamer(error)
    with pytest.raises(type(error)):
        greedy(target, prompt, 20, assistant_model=drafter, **options)
    undo()
    assert not target.model.hc_head._forward_pre_hooks
    assert (footprint(target), footprint(drafter)) == before
    assert not any(layer.record_past for layer in cache.layers)
    assert greedy(target, prompt, 20, assistant_model=drafter).tolist() == plain[:, :30].tolist()
    assert greedy(target, prompt, 20).tolist() == plain[:, :30].tolist()


def test_drafter_does_not_keep_its_target_alive(prompt):
    """https://github.com/huggingface/transformers/issues/33807"""
    target = tiny_target()
    drafter = tiny_drafter(target)
    out = greedy(target, prompt, 8, assistant_model=drafter, return_dict_in_generate=True)
    target = weakref.ref(target)
    gc.collect()
    assert target() is None
    assert out.sequences.shape == (1, 18)
    assert all(isinstance(p, torch.nn.Parameter) for p in drafter.parameters())


def test_two_threads_with_one_target(target, prompt, plain):
    """Each call's tap sees the forwards of its own thread only."""
    prompts = [prompt, random_ids(23, seed=4)]
    wanted = [plain[:, :34].tolist(), greedy(target, prompts[1], 24).tolist()]
    contexts, results = [[], []], [None, None]
    barrier = threading.Barrier(2, timeout=60)

    def work(slot):
        torch.set_num_threads(1)
        drafter = tiny_drafter(target)
        own = drafter.draft

        def draft(request):
            contexts[slot].append(request.context.shape[1])
            return own(request)

        drafter.draft = draft
        barrier.wait()
        results[slot] = greedy(target, prompts[slot], 24, assistant_model=drafter).tolist()

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == wanted
    for context, ids in zip(contexts, prompts, strict=True):
        assert context[0] == ids.shape[1]
        assert sum(context) <= ids.shape[1] + 24
    assert not target.model.hc_head._forward_pre_hooks


# ----------------------------------------------------------------------------------------------------- adapted targets


def test_adapted_target_is_decoded_and_tapped_with_its_adapter(prompt):
    """Its context comes from the adapted forward; with the adapter off, everything is the base model's.

    https://github.com/vllm-project/vllm/pull/11966
    """
    base = tiny_target()
    base_ids = greedy(base, prompt, 20)
    with torch.no_grad():
        base_logits = base(prompt).logits
    torch.manual_seed(2)
    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_b_proj", "kv_proj", "o_b_proj"], init_lora_weights=False
    )
    adapted = get_peft_model(base, config).eval()
    with torch.no_grad():
        assert (adapted(prompt).logits - base_logits).abs().max() > 0.1
    want = greedy(adapted, prompt, 20)
    assert want.tolist() != base_ids.tolist()
    assert_lossless(base, prompt, want, max_new_tokens=20)
    residuals = []
    handle = base.model.hc_head.register_forward_pre_hook(lambda module, args: residuals.append(args[0]))
    with torch.no_grad():
        adapted(want)
    handle.remove()
    for pattern in (ALWAYS, 1):
        drafter = scripted_drafter(base, want, pattern)
        own, contexts = drafter.draft, []

        def draft(request, own=own, contexts=contexts):
            contexts.append(request.context)
            return own(request)

        drafter.draft = draft
        assert greedy(adapted, prompt, 20, assistant_model=drafter).tolist() == want.tolist()
        context = torch.cat(contexts, dim=1)
        torch.testing.assert_close(context, residuals[0][:, : context.shape[1]], atol=1e-4, rtol=0)
    with adapted.disable_adapter():
        drafter = scripted_drafter(base, base_ids, 2)
        assert greedy(adapted, prompt, 20, assistant_model=drafter).tolist() == base_ids.tolist()
    assert greedy(adapted, prompt, 20, assistant_model=tiny_drafter(base)).tolist() == want.tolist()


@pytest.mark.parametrize("where", ["streamer", "criterion", "processor", "forward"])
def test_an_interrupted_call_leaves_only_verified_positions_in_the_users_cache(where):
    """Ctrl-C in the middle of a round: the cache holds a prefix of the plain sequence, and can be used again."""
    target = tiny_target()
    prompt = random_ids(10)
    want = greedy(target, prompt, 20)
    calls = []

    def interrupt(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return {"processor": args[1], "forward": None}.get(where, torch.tensor([False]))

    class Streamer(BaseStreamer):
        put = end = interrupt

    options = {
        "streamer": {"streamer": Streamer()},
        "criterion": {"stopping_criteria": StoppingCriteriaList([interrupt])},
        "processor": {"logits_processor": LogitsProcessorList([interrupt])},
        "forward": {},
    }[where]
    hook = target.model.layers[1].register_forward_hook(interrupt if where == "forward" else lambda *args: None)
    cache = DynamicCache(config=target.config)
    drafter = scripted_drafter(target, want, lambda r: (0, 2)[r % 2], block_size=4)
    with pytest.raises(KeyboardInterrupt):
        greedy(target, prompt, 20, cache=cache, assistant_model=drafter, **options)
    hook.remove()
    length = cache.get_seq_length()
    assert length > 10
    fresh = make_rewindable(DynamicCache(config=target.config), target.config)
    with torch.no_grad():
        target(want[:, :length], cache=fresh, use_cache=True)
    assert_same_state(cache, fresh)


def test_a_cache_serves_a_drafter_after_prompt_lookup_was_interrupted_twice(monkeypatch):
    """Ctrl-C in the call, and again at the end of the recovery, before the limit on rewinds is lifted."""
    target = tiny_target()
    want = greedy(target, random_ids(10), 30)
    cache = DynamicCache(config=target.config)
    own = RewindableSlidingLayer.crop

    def interrupt(*args):
        monkeypatch.setattr(RewindableSlidingLayer, "crop", interrupt_again)
        raise KeyboardInterrupt

    def interrupt_again(self, tokens_to_remove):
        own(self, tokens_to_remove)
        if self is cache.layers[-1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        greedy(
            target,
            want[:, :10],
            8,
            cache=cache,
            prompt_lookup_num_tokens=2,
            stopping_criteria=StoppingCriteriaList([interrupt]),
        )
    monkeypatch.undo()
    assert cache.get_seq_length()
    drafter = scripted_drafter(target, want, 0, block_size=7)
    assert greedy(target, want[:, :20], 20, cache=cache, assistant_model=drafter).tolist() == want.tolist()


class Interrupts:
    """Raises `KeyboardInterrupt` before the given lines of the cache's code, counted over a call, as Ctrl-C may."""

    FILES = (inspect.getsourcefile(RewindableSlidingLayer), inspect.getsourcefile(DeepseekV4HCACache))

    def __init__(self, *lines: int):
        self.lines, self.passed = lines, 0

    def __enter__(self):
        sys.settrace(self.enter_frame)
        return self

    def __exit__(self, *exc):
        sys.settrace(None)

    def enter_frame(self, frame, event, argument):
        owner = type(frame.f_locals.get("self")).__name__
        if frame.f_code.co_filename in self.FILES and (owner.startswith("Rewindable") or "self" not in frame.f_locals):
            return self.count_line
        return None

    def count_line(self, frame, event, argument):
        if event == "line":
            self.passed += 1
            if self.passed in self.lines:
                raise KeyboardInterrupt
        return self.count_line


def check_interruptions(lines: range, more: tuple[int, ...] = ()) -> tuple[int, int]:
    """A call is interrupted before each of these lines of the cache's code, and again so many lines later; then its
    cache gives plain decoding's ids or is refused. Returns how often each."""
    target = tiny_target((SLIDING, CSA, HCA), window=6, csa=2, hca=3)
    want = greedy(target, random_ids(9), 20)
    num_used = num_refused = 0
    for line in lines:
        cache = DynamicCache(config=target.config)
        drafter = scripted_drafter(target, want, lambda r: (0, 2)[r % 2], block_size=4)
        with Interrupts(line, *(line + n for n in more)) as interrupts, contextlib.suppress(KeyboardInterrupt):
            greedy(target, want[:, :9], 8, cache=cache, assistant_model=drafter)
        assert interrupts.passed >= line, "no such line: the call ended before it"
        try:
            outcome = greedy(target, want[:, :19], 10, cache=cache, assistant_model=drafter.follow(want, 2)).tolist()
        except ValueError as error:
            outcome = str(error)
        is_refused = "start from a new cache" in outcome
        assert is_refused or outcome == want[:, :29].tolist(), (line, outcome)
        num_refused += is_refused
        num_used += not is_refused
    return num_used, num_refused


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (6,), (1, 2)], ids=["once", "again in the recovery", "three times"])
def test_a_cache_interrupted_between_any_two_lines_gives_the_right_ids_or_is_refused(more):
    num_used, num_refused = check_interruptions(range(3, 500, 23), more)
    assert num_used
    assert num_refused


@pytest.mark.slow
@pytest.mark.parametrize("lines", [range(1, 560, 6), nightly(range(1, 560))], ids=["every sixth", "every"])
def test_a_cache_interrupted_before_a_line_gives_the_right_ids_or_is_refused(lines):
    check_interruptions(lines)


def test_an_error_in_the_recovery_does_not_replace_the_calls_own(target, prompt, monkeypatch):
    def fails(self, tokens_to_remove):
        raise IndexError("of the recovery")

    def interrupt(*args):
        monkeypatch.setattr(RewindableSlidingLayer, "crop", fails)
        raise RuntimeError("of the call")

    for options in ({"assistant_model": tiny_drafter(target)}, {"prompt_lookup_num_tokens": 2}):
        with monkeypatch.context(), target_hook(target, interrupt), pytest.raises(RuntimeError, match="of the call"):
            greedy(target, prompt, 8, **options)
        monkeypatch.undo()


@contextlib.contextmanager
def target_hook(target, hook):
    handle = target.model.layers[1].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_an_interrupted_prompt_lookup_leaves_no_unverified_position(target, prompt):
    cache = DynamicCache(config=target.config)

    def interrupt(module, args, output):
        if cache.layers[1].get_seq_length() > 14:
            raise KeyboardInterrupt

    with target_hook(target, interrupt), pytest.raises(KeyboardInterrupt):
        greedy(target, prompt, 20, cache=cache, prompt_lookup_num_tokens=3)
    length = cache.get_seq_length()
    assert 0 < length <= 14
    plain = greedy(target, prompt, 20)
    fresh = make_rewindable(DynamicCache(config=target.config), target.config)
    with torch.no_grad():
        target(plain[:, :length], cache=fresh, use_cache=True)
    assert_same_state(cache, fresh)


@pytest.mark.parametrize(
    ("door", "options"),
    [
        ("early exit", {"assistant_early_exit": 1}),
        ("early exit beside prompt lookup", {"assistant_early_exit": 1, "prompt_lookup_num_tokens": 2}),
        ("the library's own MTP", {"use_mtp": True}),
    ],
)
def test_what_needs_more_than_a_rewind_stays_refused(prompt, door, options):
    """Before any work, as without the set-up; the target is as it was."""
    target = tiny_target()
    before = footprint(target)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        greedy(target, prompt, 6, **options)
    assert footprint(target) == before
    assert greedy(target, prompt, 6).shape == (1, 16)


def test_recipes_that_crop_caches_still_refuse_a_stateful_model(target, prompt):
    """transformers-community/contrastive-search and dola ask the model for this flag."""
    assert target._is_stateful
    asked = []
    target.generate(prompt, max_new_tokens=1, custom_generate=lambda model, *a, **k: asked.append(model._is_stateful))
    assert asked == [True]


def test_a_compiled_wrapper_is_refused_as_it_would_not_be_run(target, prompt):
    drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match=r"drafter\.compile\(\)"):
        greedy(target, prompt, 4, assistant_model=torch.compile(drafter))


def test_a_filled_cache_is_refused_where_the_library_would_feed_it_twice():
    """Prompt lookup and ordinary assistants give wrong text there, in every model."""
    target = tiny_target()
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(random_ids(5), cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="holds 5 positions"):
        greedy(target, random_ids(9), 4, cache=cache, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("num_assistant_tokens", [-1, 2.5])
def test_a_number_of_drafts_that_is_none_is_refused(target, prompt, num_assistant_tokens):
    match = f"num_assistant_tokens={num_assistant_tokens} must be a whole number"
    assert_refused(target, prompt, tiny_drafter(target), match, num_assistant_tokens=num_assistant_tokens)


def test_an_empty_prompt_is_refused(target):
    empty = torch.zeros((1, 0), dtype=torch.long)
    assert_refused(target, empty, tiny_drafter(target), "the prompt is empty: pass at least one token")


@pytest.mark.slow
@pytest.mark.parametrize("negative", [None, 4])
def test_guidance_gives_the_ids_of_plain_decoding(target, prompt, negative):
    """Its processor runs the target once more for every token, and keeps a cache of its own."""
    options = {"guidance_scale": 1.5}
    if negative is not None:
        options["negative_prompt_ids"] = random_ids(negative, seed=9)
    want = greedy(target, prompt, 16, **options)
    assert want.tolist() != greedy(target, prompt, 16).tolist()
    assert_lossless(target, prompt, want, max_new_tokens=16, **options)


@pytest.mark.parametrize("layers", [[0], [1, 2], [-1]])
def test_hidden_states_of_single_layers_are_returned_as_by_plain_decoding(target, prompt, plain, layers):
    """`output_hidden_states` may be a list; the others are None. https://github.com/huggingface/transformers/pull/43539"""
    options = {"output_hidden_states": layers, "return_dict_in_generate": True}
    want = greedy(target, prompt, 12, **options).hidden_states
    drafter = scripted_drafter(target, plain, 2)
    got = greedy(target, prompt, 12, assistant_model=drafter, **options).hidden_states
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert [state is None for state in ours] == [state is None for state in theirs]
        assert any(state is not None for state in ours)
        for a, b in zip(ours, theirs, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


class Wrapped(torch.nn.Module):
    """A module around another, as an adapter or a quantiser puts there: it has no `weight` of its own."""

    def __init__(self, module):
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x)


class Packed(torch.nn.Module):
    """A head as AWQ and GPTQ leave it: integers and scales, no `weight`."""

    def __init__(self, linear):
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wrapped", "packed head", "dynamically quantised"])
def test_heads_and_embeddings_without_a_weight_are_served(prompt, kind):
    """As plain decoding serves them."""
    target = tiny_target()
    fingerprint = target_fingerprint(fingerprint_tensors(target))
    if kind == "wrapped":
        target.set_input_embeddings(Wrapped(target.get_input_embeddings()))
        target.lm_head = Wrapped(target.lm_head)
    elif kind == "packed head":
        target.lm_head = Packed(target.lm_head)
    else:
        target.lm_head = torch.ao.quantization.quantize_dynamic(
            torch.nn.Sequential(target.lm_head), {torch.nn.Linear}, dtype=torch.qint8
        )[0]
        assert callable(target.lm_head.weight)
    want = greedy(target, prompt, 16)
    assert_lossless(target, prompt, want, max_new_tokens=16)
    for options in ({}, {"draft_head": "markov", "markov_rank": 4, "draft_confidence": True}):
        drafter = tiny_drafter(target, target_fingerprint=fingerprint, **options)
        assert greedy(target, prompt, 16, assistant_model=drafter).tolist() == want.tolist()


@pytest.mark.parametrize("part", ["lm_head", "embed_tokens"])
def test_training_refuses_a_target_whose_head_or_embedding_has_no_weight(part):
    target = tiny_target()
    owner = target if part == "lm_head" else target.model
    setattr(owner, part, Wrapped(getattr(owner, part)))
    what = "LM head" if part == "lm_head" else "embedding"
    with pytest.raises(ValueError, match=f"the target's {what} is a Wrapped without a plain weight"):
        TargetHead.from_target(target)


def test_a_target_left_on_paged_attention_is_refused(prompt):
    """The library's `cache_implementation="paged"` fails for V4, and leaves it so; plain decoding is off then too."""
    target = tiny_target()
    target.config._attn_implementation = "paged|eager"
    match = r"attention is 'paged\|eager', .*set_attn_implementation\('eager'\)"
    for options in assisted_calls(target):
        with pytest.raises(ValueError, match=match):
            greedy(target, prompt, 8, **options)


def assisted_calls(target) -> list[dict]:
    """The options of `generate` that make it assisted: a drafter, the native MTP module, prompt lookup."""
    mtp = DeepseekV4MTP(target.config).eval()
    return [{"assistant_model": tiny_drafter(target)}, {"assistant_model": mtp}, {"prompt_lookup_num_tokens": 3}]


@pytest.mark.parametrize(
    "adapter",
    [
        PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=3, num_attention_heads=1, token_dim=16
        ),
        PromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=3, num_attention_heads=2, token_dim=32
        ),
    ],
    ids=["prefix", "prompt"],
)
def test_virtual_tokens_before_the_prompt_are_refused(prompt, plain, adapter):
    """Prefix tuning changed ids without a word; the base model itself goes on working."""
    target = tiny_target()
    calls = assisted_calls(target)
    adapted = get_peft_model(target, adapter)
    for options in calls:
        with pytest.raises(ValueError, match="TUNING puts virtual tokens before the prompt"):
            adapted.generate(input_ids=prompt, do_sample=False, max_new_tokens=8, **options)
        assert greedy(target, prompt, 8, **options).tolist() == plain[:, :18].tolist()


def test_another_model_than_a_deepseek_v4_is_refused_in_one_sentence(target, prompt):
    """Of the same vocabulary; for others the library asks for tokenizers first, and then it is this sentence too."""
    match = "a drafter does not generate by itself: .* its DeepSeek-V4 target"
    for drafter in (tiny_drafter(target), DeepseekV4MTP(target.config).eval()):
        with pytest.raises(NotImplementedError, match=match):
            greedy(llama(target), prompt, 8, assistant_model=drafter)
        with pytest.raises(NotImplementedError, match=match):
            drafter.generate(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [None, TINY_WORLD_TARGET.with_name("drafter")], ids=["made by init", "example"])
def test_the_text_generation_pipeline_takes_a_drafter(tmp_path, folder):
    """It compares the special tokens of both configurations, which raised an AttributeError."""
    target = DeepseekV4ForCausalLM.from_pretrained(TINY_WORLD_TARGET)
    tokenizer = AutoTokenizer.from_pretrained(TINY_WORLD_TARGET)
    drafter = HyperDFlashModel.from_pretrained(
        folder or init_drafter(TINY_WORLD_TARGET, tmp_path / "d", mask_token_id=3)
    )
    calls, draft_hidden = [], drafter.draft_hidden
    drafter.draft_hidden = lambda request: calls.append(1) or draft_hidden(request)
    options = {"do_sample": False, "max_new_tokens": 8, "return_full_text": False}
    texts = ["def add(a, b):", "The three largest"]
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert drafted(texts, **options) == plain(texts, **options)
    assert calls
    with pytest.raises(ValueError, match="batch size 1, got 2 prompts: .*leave a pipeline's batch_size at 1"):
        drafted(texts, batch_size=2, **options)


def test_a_newer_transformers_is_one_warning_that_lists_what_was_checked(monkeypatch, caplog):
    restored_v4(monkeypatch)
    monkeypatch.setattr(target_module.transformers, "__version__", "5.25.1")
    set_up_deepseek_v4()
    set_up_deepseek_v4()
    lines = [line for line in caplog.messages if "5.25.1" in line]
    assert len(lines) == 1
    assert "tested with transformers 5.24.0" in lines[0]
    assert all(name in lines[0] for name in (*SEAMS, "forward"))


@pytest.mark.parametrize("version", ["5.24.0", "5.24.3"])
def test_a_tested_transformers_and_its_fixes_are_not_warned_of(monkeypatch, caplog, version):
    restored_v4(monkeypatch)
    monkeypatch.setattr(target_module.transformers, "__version__", version)
    set_up_deepseek_v4()
    assert not caplog.messages


def test_a_renamed_cache_argument_is_the_error_that_names_the_tested_versions(monkeypatch):
    """The library has renamed it before."""
    restored_v4(monkeypatch)
    monkeypatch.setattr(DeepseekV4ForCausalLM, "forward", lambda self, input_ids, past_key_values=None: None)
    with pytest.raises(ImportError, match=r"lacks .*DeepseekV4ForCausalLM\.forward\(.*cache"):
        set_up_deepseek_v4()


def test_int32_prompts_are_decoded():
    target = tiny_target()
    prompt = random_ids(7)
    drafted = greedy(target, prompt.int(), 12, assistant_model=tiny_drafter(target))
    assert drafted.tolist() == greedy(target, prompt, 12).tolist()


def test_a_processor_that_runs_the_target_does_not_disturb_the_context():
    """Its forwards are not the loop's: the drafter reads what it reads without them."""
    target = tiny_target()
    prompt = random_ids(9)
    want = greedy(target, prompt, 24)

    class RunsTheTarget(LogitsProcessor):
        def __call__(self, input_ids, scores):
            target(input_ids.expand(2, -1), use_cache=False)
            return scores

    contexts = []
    for processors in ([], [RunsTheTarget()]):
        drafter = scripted_drafter(target, want, lambda r: (0, ALWAYS, 1)[r % 3], block_size=4)
        own, seen = drafter.draft, []
        drafter.draft = lambda request, own=own, seen=seen: seen.append(request.context.clone()) or own(request)
        got = greedy(target, prompt, 24, assistant_model=drafter, logits_processor=LogitsProcessorList(processors))
        assert got.tolist() == want.tolist()
        contexts.append(seen)
    assert len(contexts[0]) == len(contexts[1])
    for a, b in zip(*contexts, strict=True):
        torch.testing.assert_close(a, b)


def test_a_target_with_offloaded_weights_drafts():
    """What `device_map="auto"` does with a target that does not fit: weights are on the meta device until used."""
    from accelerate import cpu_offload

    target = tiny_target()
    prompt = random_ids(9)
    want = greedy(target, prompt, 16)
    drafter = tiny_drafter(target, target_fingerprint=target_fingerprint(fingerprint_tensors(target)))
    cpu_offload(target, execution_device="cpu")
    assert target.lm_head.weight.is_meta
    assert greedy(target, prompt, 16, assistant_model=drafter).tolist() == want.tolist()
