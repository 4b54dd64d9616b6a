"""`init`: a drafter inherits the gate from whatever style of DeepSeek-V4 checkpoint, and says what it cannot use."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_v4 import MASK_TOKEN_ID, TINY_WORLD_TARGET, features_recipe, greedy, random_ids, tiny_target
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from hyperdflash import __main__ as cli
from hyperdflash import generation_hyperdflash
from hyperdflash.common import checkpoint
from hyperdflash.common.files import written_whole
from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.pairing_hyperdflash import compare_fingerprint, fingerprint_tensors, target_fingerprint
from hyperdflash.parsers import make_parser
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training import init
from hyperdflash.training.init import default_sizes, drafter_config, init_drafter, spread_layers
from hyperdflash.training.losses import drafter_loss

CLOSURE = {
    "configuration_hyperdflash.py",
    "modeling_hyperdflash.py",
    "target_hyperdflash.py",
    "generation_hyperdflash.py",
    "pairing_hyperdflash.py",
}
EXTRAS = {"custom_generate/generate.py", "encoding_deepseek_v4.py"}  # which save_pretrained does not know of
OFFICIAL = {
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
    "model.norm.weight": "norm.weight",
    "model.embed_tokens.weight": "embed.weight",
}


@pytest.fixture(scope="module")
def target():
    model = tiny_target()
    head, norm = model.model.hc_head, model.model.norm
    with torch.no_grad():  # away from their initial zeros and ones
        for parameter in (head.hc_base, head.hc_scale, norm.weight):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    """Safetensors files with an index."""
    for file, tensors in shards.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def mixed(target, tmp_path_factory) -> Path:
    """What `save_pretrained` writes: one file, `head.weight` beside `model.*` names."""
    folder = tmp_path_factory.mktemp("mixed") / "tiny-v4"
    target.save_pretrained(folder)
    return folder


@pytest.fixture
def official(mixed, tmp_path) -> Path:
    """DeepSeek's naming, each of the head's parts in a shard of its own; the other shards are not there at all."""
    folder = tmp_path / "official-v4"
    folder.mkdir()
    shutil.copy(mixed / "config.json", folder)
    tensors = load_file(mixed / "model.safetensors")
    mine = {new: tensors[old] for old, new in OFFICIAL.items()}
    shards = {
        "model-00001-of-00046.safetensors": {"embed.weight": mine.pop("embed.weight").bfloat16()},
        "model-00045-of-00046.safetensors": {"norm.weight": mine.pop("norm.weight").bfloat16()},
        "model-00046-of-00046.safetensors": mine,
    }
    write_shards(folder, shards)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].update({"layers.0.attn.wq_a.weight": "model-00002-of-00046.safetensors"})
    content["weight_map"].update({"head.weight": "model-00044-of-00046.safetensors"})
    index.write_text(json.dumps(content))
    return folder


def edit(folder: Path, **changes) -> None:
    """Change entries of a target's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def stored_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def make(target, out, **kwargs) -> HyperDFlashModel:
    return HyperDFlashModel.from_pretrained(init_drafter(target, out, **{"mask_token_id": MASK_TOKEN_ID, **kwargs}))


def assert_inherits(drafter: HyperDFlashModel, target) -> None:
    for name in ("hc_fn", "hc_base", "hc_scale"):
        inherited = getattr(drafter.reducer, name)
        assert inherited.dtype == torch.float32
        assert torch.equal(inherited, getattr(target.model.hc_head, name)), name


# --------------------------------------------------------------------------------------------- what a drafter inherits


def test_the_gate_of_a_transformers_checkpoint_is_inherited_bit_for_bit(target, mixed, tmp_path):
    """https://github.com/vllm-project/speculators/pull/524 https://github.com/huggingface/transformers/pull/43683"""
    drafter = make(mixed, tmp_path / "out")
    assert_inherits(drafter, target)
    assert drafter.config.reducer == "hc_gate"
    assert compare_fingerprint(drafter.config.target_fingerprint, target) == []


def test_the_gate_of_an_official_checkpoint_is_inherited_from_the_shards_that_hold_it(target, official, tmp_path):
    """Shards without the head's parts are not on the disk."""
    drafter = make(official, tmp_path / "out")
    assert_inherits(drafter, target)
    expected = target_fingerprint(fingerprint_tensors(target))
    assert drafter.config.target_fingerprint == {name: pytest.approx(v, abs=1e-6) for name, v in expected.items()}


def test_sharded_and_bare_models_are_read_too(target, tmp_path):
    target.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    target.model.save_pretrained(tmp_path / "bare")
    for style in ("sharded", "bare"):
        assert_inherits(make(tmp_path / style, tmp_path / f"{style}-out"), target)


def test_a_gate_stored_in_bf16_is_widened_exactly(mixed, target, tmp_path):
    shutil.copytree(mixed, tmp_path / "bf16")
    tensors = load_file(mixed / "model.safetensors")
    save_file(
        {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()},
        tmp_path / "bf16" / "model.safetensors",
    )
    drafter = make(tmp_path / "bf16", tmp_path / "out")
    assert torch.equal(drafter.reducer.hc_fn, target.model.hc_head.hc_fn.bfloat16().float())


def test_only_single_rows_of_the_embedding_are_read(mixed, tmp_path, monkeypatch):
    """V4-Flash's embedding is 1.06 GB."""
    whole, sliced = [], []

    class Recorder:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *exc):
            return self.file.__exit__(*exc)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            whole.append(name)
            return self.file.get_tensor(name)

        def get_slice(self, name):
            part = self.file.get_slice(name)

            class Slice:
                get_shape, get_dtype = part.get_shape, part.get_dtype

                def __getitem__(self, rows):
                    sliced.append((name, rows.stop - rows.start))
                    return part[rows]

            return Slice()

    monkeypatch.setattr(checkpoint, "safe_open", lambda *args, **kwargs: Recorder(safe_open(*args, **kwargs)))
    init_drafter(mixed, tmp_path / "out", mask_token_id=MASK_TOKEN_ID)
    assert sorted(whole) == sorted(name for name in OFFICIAL if "embed" not in name)
    assert sliced == [("model.embed_tokens.weight", 1)] * 4


def test_without_its_norm_the_inherited_gate_is_the_targets_own_collapse(target, mixed, tmp_path):
    """To 1e-6 against the target's module and against float64.

    https://github.com/vllm-project/speculators/pull/524 https://github.com/huggingface/transformers/pull/43683
    """
    reducer = make(mixed, tmp_path / "out").reducer
    reducer.path_norm = None
    head = target.model.hc_head
    streams = torch.randn(2, 5, 2, 32, generator=torch.Generator().manual_seed(0)) * 3
    with torch.no_grad():
        torch.testing.assert_close(reducer(streams), head(streams), atol=1e-6, rtol=0)
        H = streams.double()
        flat = H.flatten(2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + target.config.rms_norm_eps)
        alpha = torch.sigmoid(flat @ head.hc_fn.double().T * head.hc_scale.double() + head.hc_base.double())
        expected = ((alpha + target.config.hc_eps)[..., None] * H).sum(2)
        torch.testing.assert_close(reducer(streams).double(), expected, atol=1e-6, rtol=1e-6)


def test_a_bf16_load_keeps_the_gate_and_its_maths_in_fp32(target, mixed, tmp_path):
    """https://github.com/huggingface/transformers/pull/43683"""
    out = init_drafter(mixed, tmp_path / "out", mask_token_id=MASK_TOKEN_ID)
    drafter = HyperDFlashModel.from_pretrained(out, dtype=torch.bfloat16)
    assert drafter.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert_inherits(drafter, target)
    streams = torch.randn(1, 64, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        expected = HyperDFlashModel.from_pretrained(out).reducer(streams.float()).bfloat16()
        assert torch.equal(drafter.reducer(streams), expected)


@pytest.mark.parametrize("cached", [False, True], ids=["one forward", "with a cache"])
def test_the_tapped_residual_is_what_the_targets_head_collapses(target, cached):
    """https://github.com/vllm-project/vllm/pull/42704 https://github.com/microsoft/onnxruntime-genai/pull/2538"""
    ids = random_ids(13)
    cache = DynamicCache(config=target.config) if cached else None
    parts = ids.split([9, 1, 3], dim=1) if cached else [ids]
    with torch.no_grad(), ResidualTap(target) as tap:
        states = [target.model(part, cache=cache, use_cache=cached).last_hidden_state for part in parts]
        residual = tap.take()
        assert residual.shape == (1, 13, 2, 32)
        collapsed = target.model.norm(target.model.hc_head(residual))
    torch.testing.assert_close(collapsed, torch.cat(states, dim=1), atol=1e-5, rtol=0)


def test_a_new_drafter_decodes_with_its_target_and_warns_with_another(target, mixed, tmp_path, monkeypatch):
    """https://github.com/ggml-org/llama.cpp/pull/3812"""
    drafter, ids, messages, calls = make(mixed, tmp_path / "out"), random_ids(9), [], []
    draft = drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda *args: calls.append(1) or draft(*args))
    monkeypatch.setattr(generation_hyperdflash.logger, "warning", messages.append)
    assert torch.equal(greedy(target, ids, 12, assistant_model=drafter), greedy(target, ids, 12))
    assert calls
    assert messages == []
    other = tiny_target(seed=1)
    assert torch.equal(greedy(other, ids, 12, assistant_model=drafter), greedy(other, ids, 12))
    assert len(messages) == 1
    assert f"the drafter {drafter.name_or_path} was made for another target (tiny-v4)" in messages[0]


# ----------------------------------------------------------------------------------------------- when there is no gate


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"context_source": "hidden_layers"}, "context_source 'hidden_layers'"),
        ({"hidden_size": 48}, "width 48 is not the target's 32"),
    ],
    ids=["other source", "other width"],
)
def test_the_dense_projection_is_chosen_stored_and_said_in_one_line(mixed, target, tmp_path, caplog, options, reason):
    """https://github.com/vllm-project/speculators/pull/524"""
    drafter = make(mixed, tmp_path / "out", **options)
    lines = [r.getMessage() for r in caplog.records if r.name == init.__name__]
    assert len(lines) == 1
    assert "'fc'" in lines[0]
    assert reason in lines[0]
    assert stored_config(tmp_path / "out")["reducer"] == "fc"
    ids = random_ids(9)
    assert torch.equal(greedy(target, ids, 8, assistant_model=drafter), greedy(target, ids, 8))


@pytest.mark.parametrize("width", [16, 48], ids=["narrower", "wider"])
@pytest.mark.parametrize("source", ["pre_hc_head", "hidden_layers"])
def test_a_drafter_of_another_width_than_the_targets_drafts_and_learns(mixed, target, tmp_path, width, source):
    """Its heads included. It was made, and then neither generated nor trained."""
    heads = {"draft_head": "markov", "markov_rank": 4, "markov_gate": True, "draft_confidence": True}
    drafter = make(mixed, tmp_path / "out", hidden_size=width, context_source=source, **heads)
    assert drafter.norm.weight.shape == (width,)
    calls, draft_hidden, ids = [], drafter.draft_hidden, random_ids(9)
    drafter.draft_hidden = lambda request: calls.append(1) or draft_hidden(request)
    assert torch.equal(greedy(target, ids, 12, assistant_model=drafter), greedy(target, ids, 12))
    assert calls
    num_layers = len(drafter.config.target_layer_ids) if source == "hidden_layers" else 1
    previous, labels = random_ids(7), random_ids(6, seed=1)
    output = drafter(
        noise_embeds=target.get_input_embeddings()(previous).detach(),
        context_hidden_states=torch.randn(1, 5, 2, 32 * num_layers),
        previous_ids=previous,
    )
    assert output.last_hidden_state.shape == (1, 7, 32)
    assert output.confidence_logits.shape == (1, 7, 2)
    loss = drafter_loss(
        output.last_hidden_state[:, 1:],
        labels,
        target.lm_head.weight.detach(),
        torch.randn(1, 2, 32),
        gamma=4,
        alpha=1,
        temperature=1,
        markov_states=output.markov_states[:, 1:],
        markov_w2=drafter.markov_head.markov_w2,
    ).loss
    loss.backward()
    for projection in (drafter.embed_proj, drafter.head_proj):
        assert projection.weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_a_recipe_trains_a_drafter_of_another_width_whose_checkpoint_drafts(tmp_path):
    """Online and with its own evaluation by decoding; the tiny target is 192 wide."""
    more = "features: online\nnum_train_epochs: 1\neval_decode_prompts: 1\neval_strategy: epoch\nreport_to: none\n"
    recipe = features_recipe(tmp_path, more)
    options = "drafter={mask_token_id: 3, num_hidden_layers: 1, hidden_size: 64}"
    assert cli.main(["train", str(recipe), options]) == 0
    drafter = HyperDFlashModel.from_pretrained(tmp_path / "run" / "final")
    assert (drafter.config.hidden_size, drafter.config.reducer) == (64, "fc")
    assert drafter.embed_proj.weight.shape == (64, 192)
    target, ids = DeepseekV4ForCausalLM.from_pretrained(TINY_WORLD_TARGET), torch.arange(20, 29)[None]
    assert torch.equal(greedy(target, ids, 8, assistant_model=drafter), greedy(target, ids, 8))


def test_a_drafter_of_the_targets_width_has_no_projections(mixed, tmp_path):
    assert not [name for name in make(mixed, tmp_path / "out").state_dict() if name.startswith(("embed_", "head_"))]


def test_a_target_without_a_learned_head_gets_the_dense_projection(official, tmp_path, caplog):
    shard = official / "model-00046-of-00046.safetensors"
    index = json.loads((official / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != shard.name}
    (official / "model.safetensors.index.json").write_text(json.dumps(index))
    shard.unlink()
    drafter = make(official, tmp_path / "out")
    assert drafter.config.reducer == "fc"
    assert [r.getMessage() for r in caplog.records if "no learned hc_head" in r.getMessage()]
    assert set(drafter.config.target_fingerprint) == {"norm.weight", "embed.weight"}


def test_a_head_that_is_there_in_part_is_refused_by_name(official, tmp_path):
    file = official / "model-00046-of-00046.safetensors"
    tensors = load_file(file)
    del tensors["hc_head_scale"]
    save_file(tensors, file)
    index = json.loads((official / "model.safetensors.index.json").read_text())
    del index["weight_map"]["hc_head_scale"]
    (official / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="official-v4 has no tensor hc_head_scale"):
        make(official, tmp_path / "out")


@pytest.mark.parametrize("options", [{"hidden_size": 48}, {"context_source": "hidden_layers"}])
def test_asking_for_a_gate_that_cannot_be_inherited_is_refused(mixed, tmp_path, options):
    with pytest.raises(ValueError, match="'hc_gate' cannot be inherited: .*'fc'"):
        make(mixed, tmp_path / "out", reducer="hc_gate", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reducer", ["fc", "mean"])
def test_another_reducer_can_be_asked_for_without_a_warning(mixed, tmp_path, caplog, reducer):
    assert make(mixed, tmp_path / "out", reducer=reducer).config.reducer == reducer
    assert [r for r in caplog.records if r.name == init.__name__] == []


# --------------------------------------------------------------------------------------------- targets and their files


def test_v4_1_is_refused_by_name(mixed, tmp_path):
    shutil.copytree(mixed, tmp_path / "v41")
    content = stored_config(mixed)
    content = {"model_type": "deepseek_v41", "text_config": content}
    (tmp_path / "v41" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"v41 is DeepSeek-V4\.1 .*no learned hc_head.*no model class"):
        make(tmp_path / "v41", tmp_path / "out")


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", None])
def test_another_model_type_is_refused_and_named(mixed, tmp_path, model_type):
    shutil.copytree(mixed, tmp_path / "other")
    edit(tmp_path / "other", model_type=model_type)
    with pytest.raises(ValueError, match=f"other has model_type {model_type!r}.*deepseek_v4"):
        make(tmp_path / "other", tmp_path / "out")


@pytest.mark.parametrize("sign", ["tensors", "config"])
def test_a_dspark_checkpoint_serves_and_is_said_to_lack_native_mtp(official, target, tmp_path, caplog, sign):
    if sign == "tensors":
        index = json.loads((official / "model.safetensors.index.json").read_text())
        index["weight_map"]["mtp.0.main_proj.weight"] = "model-00043-of-00046.safetensors"
        (official / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        edit(official, dspark_block_size=5, dspark_target_layer_ids=[0, 1, 2])
    assert_inherits(make(official, tmp_path / "out"), target)
    lines = [r.getMessage() for r in caplog.records if "DSpark" in r.getMessage()]
    assert len(lines) == 1
    assert "native MTP" in lines[0]


def test_a_quantised_target_gives_a_plain_drafter(official, target, tmp_path):
    """Quantised tensors lie in shards that are not there, so reading one would fail.

    https://github.com/huggingface/transformers/issues/35471
    """
    edit(official, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}, expert_dtype="fp4")
    drafter = make(official, tmp_path / "out")
    assert_inherits(drafter, target)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_head_is_refused_by_name(official, tmp_path, dtype):
    file = official / "model-00046-of-00046.safetensors"
    tensors = load_file(file)
    tensors["hc_head_fn"] = tensors["hc_head_fn"].to(dtype)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="official-v4: hc_head_fn is stored as (I8|F8_E4M3)"):
        make(official, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hc_mult": 4}, r"hc_fn has shape \(2, 64\).*\(4, 128\)"),
        ({"vocab_size": 65}, r"embed.*\(64, 32\).*\(65, 32\)"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused_by_name(mixed, tmp_path, changes, named):
    shutil.copytree(mixed, tmp_path / "odd")
    edit(tmp_path / "odd", **changes)
    with pytest.raises(ValueError, match=named):
        make(tmp_path / "odd", tmp_path / "out")


def test_a_missing_shard_and_an_lfs_pointer_are_refused_by_name(official, tmp_path):
    shard = official / "model-00046-of-00046.safetensors"
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 262168\n")
    with pytest.raises(ValueError, match=f"{shard.name} is not a readable safetensors file.*LFS"):
        make(official, tmp_path / "out")
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"official-v4 has no {shard.name}"):
        make(official, tmp_path / "out")


def test_a_target_without_safetensors_or_config_is_refused_by_name(mixed, tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="pickled has no config.json"):
        make(folder, tmp_path / "out")
    shutil.copy(mixed / "config.json", folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        make(folder, tmp_path / "out")


# --------------------------------------------------------------------------------------------------- the Hub as source


@pytest.fixture
def hub(official, tmp_path, monkeypatch):
    """A Hub cache that holds two commits of one target, offline; the shards that nobody needs are absent."""
    repo = tmp_path / "hub" / "models--some--v4"
    commits = {"main": "1" * 40, "older": "2" * 40}
    for name, commit in commits.items():
        snapshot = repo / "snapshots" / commit
        shutil.copytree(official, snapshot)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / name).write_text(commit)
        if name == "older":
            file = snapshot / "model-00046-of-00046.safetensors"
            save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return commits


def test_a_hub_target_is_read_at_one_commit_which_is_stored(hub, target, tmp_path):
    """https://github.com/huggingface/transformers/pull/23799"""
    main, older = (make("some/v4", tmp_path / str(r), revision=r) for r in (None, "older"))
    assert_inherits(main, target)
    assert torch.equal(older.reducer.hc_fn, target.model.hc_head.hc_fn + 1)
    assert [d.config.target_revision for d in (main, older)] == [hub["main"], hub["older"]]
    assert {d.config.target_name_or_path for d in (main, older)} == {"some/v4"}


class RangeReads:
    """Stands in for `HfFileSystem`: serves a folder's files, and keeps what was read of them."""

    def __init__(self, folder: Path):
        self.folder, self.opened, self.num_bytes = folder, [], 0

    def open(self, path, mode, revision, cache_type):
        assert (mode, cache_type) == ("rb", "none")
        self.opened.append((path, revision))
        file, files = (self.folder / Path(path).name).open("rb"), self

        class Reader:
            seek, close = file.seek, file.close

            def read(self, length):
                files.num_bytes += length
                return file.read(length)

        return Reader()


@pytest.mark.parametrize("sharded", [True, False])
def test_of_a_hub_target_that_is_not_in_the_cache_only_single_tensors_are_fetched(
    hub, official, target, tmp_path, monkeypatch, sharded
):
    """Whole shards were: gigabytes for 65,541 inherited numbers."""
    snapshot = tmp_path / "hub" / "models--some--v4" / "snapshots" / hub["main"]
    source = official
    if not sharded:
        (snapshot / "model.safetensors.index.json").unlink()
        source = tmp_path / "single"
        target.save_pretrained(source)
    for shard in snapshot.glob("*.safetensors"):
        shard.unlink()
    remote, download = RangeReads(source), checkpoint.hf_hub_download

    def download_small_files(repo, name, **kwargs):
        assert name.endswith(".json"), f"{name} was fetched whole"
        if not sharded and "index" in name:
            raise EntryNotFoundError(name)
        return download(repo, name, **kwargs)

    monkeypatch.setattr(checkpoint, "hf_hub_download", download_small_files)
    monkeypatch.setattr(checkpoint, "HfFileSystem", lambda: remote)
    drafter = make("some/v4", tmp_path / "out")
    assert_inherits(drafter, target)
    assert compare_fingerprint(drafter.config.target_fingerprint, target) == []
    assert {revision for _, revision in remote.opened} == {hub["main"]}
    assert len(remote.opened) == len(set(remote.opened))  # a header is fetched once, whatever its file holds
    assert all(path.startswith("some/v4/model") for path, _ in remote.opened)
    headers = sum(
        8 + int.from_bytes((source / Path(path).name).read_bytes()[:8], "little") for path, _ in remote.opened
    )
    gate, norm, rows = 4 * (2 * 64 + 2 + 1), 32 * (2 if sharded else 4), 4 * 32 * (2 if sharded else 4)
    assert remote.num_bytes == headers + gate + norm + rows


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some/absent", "some/absent is not a folder here, and its config.json could not be downloaded from the Hub"),
        ("no/such/folder", "no folder no/such/folder"),
        ("./absent", "no folder ./absent"),
    ],
)
def test_a_target_that_is_nowhere_gives_one_readable_error(hub, tmp_path, name, message):
    """https://github.com/huggingface/transformers/issues/34855"""
    with pytest.raises(OSError, match=message):
        make(name, tmp_path / "out")


def test_a_revision_of_a_folder_is_refused(mixed, tmp_path):
    with pytest.raises(ValueError, match="revision='main' belongs to a Hub id"):
        make(mixed, tmp_path / "out", revision="main")


# --------------------------------------------------------------------------------------------------- sizes and options


def test_sizes_at_v4_flash_are_the_config_defaults_and_scale_elsewhere():
    defaults = drafter_config(DeepseekV4Config()).to_dict()
    assert {name: defaults[name] for name in default_sizes(4096)} == default_sizes(4096)
    assert default_sizes(4096) == {
        "num_hidden_layers": 5,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert default_sizes(7168)["intermediate_size"] == 21504
    for width in (7168, 2048, 1024, 768, 256, 96, 32):
        sizes = default_sizes(width)
        assert sizes["num_attention_heads"] * sizes["head_dim"] == width
        assert sizes["intermediate_size"] % 64 == 0
        assert sizes["num_hidden_layers"] == (5 if width >= 1024 else 2)
        assert sizes["num_attention_heads"] % sizes["num_key_value_heads"] == 0
        assert sizes["num_key_value_heads"] in (1, 2, 4, 8)  # vLLM's processes share them evenly, or hold copies
    assert default_sizes(7168)["num_key_value_heads"] == 8


def test_every_size_can_be_given(mixed, tmp_path):
    given = {
        "num_hidden_layers": 3,
        "block_size": 5,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 16,
    }
    stored = make(mixed, tmp_path / "out", **given).config
    assert {name: getattr(stored, name) for name in given} == given


def test_heads_beyond_the_paper_can_be_asked_for(mixed, tmp_path):
    options = {
        "draft_head": "markov",
        "markov_rank": 8,
        "markov_gate": True,
        "draft_confidence": True,
        "verify_cost": 0.1,
    }
    config = make(mixed, tmp_path / "d", **options).config
    assert {name: getattr(config, name) for name in options} == options
    flags = ["--mask-token-id", "63", "--draft-head", "markov", "--markov-rank", "8", "--draft-confidence"]
    flags += ["--markov-gate", "--verify-cost", "0"]
    assert cli.main(["init", str(mixed), str(tmp_path / "e"), *flags]) == 0
    drafter = HyperDFlashModel.from_pretrained(tmp_path / "e")
    assert drafter.markov_head.markov_w1.shape == (drafter.config.vocab_size, 8)
    assert drafter.markov_head.gate is not None
    assert drafter.confidence_head is not None
    assert drafter.config.verify_cost == 0


def test_tapped_layers_spread_over_the_target():
    assert spread_layers(43, 5) == [1, 11, 20, 30, 40]
    for depth in range(1, 9):
        for num_layers in (1, 2, 5):
            layers = spread_layers(depth, num_layers)
            assert layers == sorted(set(layers))
            assert 0 <= layers[0] <= layers[-1] < depth


def test_options_that_contradict_the_target_are_value_errors(mixed, tmp_path):
    """https://github.com/charlie12345/ROCmFPX/issues/44"""
    with pytest.raises(ValueError, match=r"target_layer_ids \[3\] must lie in 0..2"):
        make(mixed, tmp_path / "out", context_source="hidden_layers", target_layer_ids=[3])
    with pytest.raises(ValueError, match="block_size"):
        make(mixed, tmp_path / "out", block_size=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size": 1}, "block_size 1 leaves no slot"),
        ({"sliding_window": 1}, "sliding_window 1 hides all context .* block of 7 positions"),
        ({"sliding_window": 7}, "sliding_window 7 hides all context"),
        ({"sliding_window": 16, "block_size": 17}, "sliding_window 16 hides all context .* 17 positions"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1; got 0"),
        ({"markov_rank": 8}, "markov_rank=8 needs draft_head=markov, and draft_head is none"),
        ({"markov_rank": 256}, "markov_rank=256 needs draft_head=markov"),  # given, though it is the default
        ({"markov_gate": True}, "markov_gate=True needs draft_head=markov"),
        ({"verify_cost": 0.5}, "verify_cost=0.5 needs draft_confidence=True"),
        ({"reducer": "fc", "reducer_path_norm": False}, "reducer_path_norm=False needs reducer=hc_gate"),
    ],
)
def test_a_drafter_that_could_not_draft_and_options_without_effect_are_refused(mixed, tmp_path, options, named):
    with pytest.raises(ValueError, match=named):
        make(mixed, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_option_is_refused_with_those_there_are(mixed, tmp_path):
    with pytest.raises(TypeError, match="no option num_layers; its options are block_size, .*num_hidden_layers"):
        make(mixed, tmp_path / "out", num_layers=3)


def test_every_option_is_a_documented_field_of_the_configuration_and_a_flag():
    parser = make_parser().commands["init"]
    flags = {action.dest: action for action in parser._actions}
    for name in init.OPTIONS:
        assert hasattr(HyperDFlashConfig, name)
        assert f"{name} (`" in HyperDFlashConfig.__doc__ or f"{name}, " in HyperDFlashConfig.__doc__
        assert flags[name].default is None


def test_the_targets_special_tokens_are_stored(mixed, tmp_path):
    """transformers' text-generation pipeline compares them with the target's."""
    shutil.copytree(mixed, tmp_path / "eos")
    edit(tmp_path / "eos", eos_token_id=[1, 7], pad_token_id=2)
    stored = stored_config(init_drafter(tmp_path / "eos", tmp_path / "out", mask_token_id=MASK_TOKEN_ID))
    assert [stored[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")] == [0, [1, 7], 2]


def test_a_mask_token_that_is_an_ordinary_word_is_said(mixed, tmp_path, caplog):
    shutil.copytree(mixed, tmp_path / "words")
    vocabulary = {f"w{i}": i for i in range(60)}
    tokenizer = {"added_tokens": [{"id": i} for i in (0, 58, 59)], "model": {"vocab": vocabulary}}
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps(tokenizer))
    for mask in (57, 59, 63):  # a word, a special token, and a row of the embedding without a token
        make(tmp_path / "words", tmp_path / str(mask), mask_token_id=mask)
    lines = [record.getMessage() for record in caplog.records if record.name == init.__name__]
    assert len(lines) == 1
    assert "mask_token_id 57 is 'w57', an ordinary token" in lines[0]


def test_the_mask_token_is_v4s_own_or_must_be_said(mixed, tmp_path):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2461"""
    assert drafter_config(DeepseekV4Config()).mask_token_id == 128799
    with pytest.raises(ValueError, match="64 .*--mask-token-id"):
        init_drafter(mixed, tmp_path / "out")


@pytest.mark.parametrize(
    ("mask", "named"), [(64, "64 is outside .* 64 tokens"), (-1, "-1 is outside"), (0, "0 is .*bos")]
)
def test_a_mask_token_that_cannot_serve_is_refused_at_creation(mixed, tmp_path, mask, named):
    """https://github.com/NVIDIA/Model-Optimizer/pull/1621 https://github.com/NVIDIA-NeMo/Automodel/pull/2461"""
    with pytest.raises(ValueError, match=f"mask_token_id {named}"):
        make(mixed, tmp_path / "out", mask_token_id=mask)


def test_a_mask_token_among_several_end_tokens_is_refused(mixed, tmp_path):
    shutil.copytree(mixed, tmp_path / "eos")
    edit(tmp_path / "eos", eos_token_id=[1, 7])
    with pytest.raises(ValueError, match="mask_token_id 7 is the target's eos_token_id"):
        make(tmp_path / "eos", tmp_path / "out", mask_token_id=7)


def test_the_seed_decides_the_weights_and_leaves_the_random_stream_alone(mixed, tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first, same, other = (make(mixed, tmp_path / str(i), seed=s).state_dict() for i, s in enumerate((1, 1, 2)))
    assert torch.equal(torch.rand(3), expected)
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])


# ---------------------------------------------------------------------------------------------------------- the folder


def test_the_folder_holds_code_config_weights_and_custom_generate(mixed, tmp_path):
    out = init_drafter(mixed, tmp_path / "deep" / "er", mask_token_id=MASK_TOKEN_ID)
    assert out == tmp_path / "deep" / "er"
    files = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert files == CLOSURE | EXTRAS | {"config.json", "model.safetensors"}
    assert [p.name for p in out.parent.iterdir()] == ["er"]
    root = Path(__file__).resolve().parents[1]
    for name in CLOSURE | EXTRAS:
        assert (out / name).read_bytes() == (root / name).read_bytes()


def test_a_local_targets_path_is_stored_nowhere(mixed, tmp_path, monkeypatch):
    monkeypatch.chdir(mixed)
    for i, path in enumerate((mixed, ".", f"../{mixed.name}/", str(mixed) + "/")):
        out = init_drafter(path, tmp_path / str(i), mask_token_id=MASK_TOKEN_ID)
        assert stored_config(out)["target_name_or_path"] == "tiny-v4"
        assert stored_config(out)["target_revision"] is None
        for file in out.rglob("*"):
            assert file.is_dir() or str(mixed.parent).encode() not in file.read_bytes()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_output_in_use_is_refused_before_the_target_is_looked_at(tmp_path, kind):
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "mine.txt").write_text("precious")
    else:
        out.write_text("precious")
    with pytest.raises(FileExistsError, match="out exists and is not an empty folder"):
        init_drafter(tmp_path / "no such target", out)
    assert (out / "mine.txt" if kind == "folder" else out).read_text() == "precious"


def test_an_empty_output_folder_is_used(mixed, tmp_path):
    (tmp_path / "out").mkdir()
    assert make(mixed, tmp_path / "out").config.reducer == "hc_gate"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_half_written_stays_behind(mixed, tmp_path, monkeypatch, error):
    save = HyperDFlashModel.save_pretrained

    def fail(drafter, folder):
        save(drafter, folder)
        assert (Path(folder) / "model.safetensors").is_file()
        raise error

    monkeypatch.setattr(HyperDFlashModel, "save_pretrained", fail)
    with pytest.raises(error):
        make(mixed, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- the command line


def run_command(*args) -> int:
    return cli.main(["init", *map(str, args)])


def test_the_command_makes_a_drafter_with_every_option(mixed, tmp_path, capsys):
    options = ["--block-size", 5, "--reducer", "fc", "--num-hidden-layers", 1, "--head-dim", 8, "--seed", 3]
    layers = ["--context-source", "hidden_layers", "--target-layer-ids", 0, 2]
    assert run_command(mixed, tmp_path / "out", "--mask-token-id", MASK_TOKEN_ID, *options, *layers) == 0
    stored = stored_config(tmp_path / "out")
    assert (stored["block_size"], stored["reducer"], stored["num_hidden_layers"], stored["head_dim"]) == (
        5,
        "fc",
        1,
        8,
    )
    assert stored["target_layer_ids"] == [0, 2]
    said = capsys.readouterr().out
    assert "4 drafts per block" in said
    weights = tmp_path / "out" / "model.safetensors"
    number = sum(tensor.numel() for tensor in load_file(weights).values())
    assert f"{number:,} parameters, {weights.stat().st_size:,} bytes" in said


def test_what_a_killed_process_left_behind_is_cleared_away(tmp_path):
    output = tmp_path / "drafter"
    (tmp_path / ".drafter.partial").mkdir()
    (tmp_path / ".drafter.partial" / "junk").touch()
    (tmp_path / ".drafter.replaced").mkdir()  # killed between the two renames: this is the folder that was there
    (tmp_path / ".drafter.replaced" / "old").touch()
    with written_whole(output, overwrite=True) as folder:
        assert [path.name for path in output.iterdir()] == ["old"]
        (folder / "new").touch()
    assert [path.name for path in output.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("problem", ["no mask token", "output in use", "no such target", "block of nothing"])
def test_the_command_fails_in_one_line(mixed, tmp_path, capsys, problem):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    mask = ("--mask-token-id", MASK_TOKEN_ID)
    args = {
        "no mask token": (mixed, tmp_path / "out"),
        "output in use": (mixed, tmp_path / "used", *mask),
        "no such target": (tmp_path / "absent", tmp_path / "out", *mask),
        "block of nothing": (mixed, tmp_path / "out", *mask, "--block-size", 0),
    }
    assert run_command(*args[problem]) == (2 if problem == "block of nothing" else 1)
    err = capsys.readouterr().err
    assert err.startswith("hyperdflash init: ")
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_command_takes_no_abbreviated_option(mixed, tmp_path, capsys):
    assert run_command(mixed, tmp_path / "out", "--mask", MASK_TOKEN_ID) == 2
    assert "--mask" in capsys.readouterr().err
