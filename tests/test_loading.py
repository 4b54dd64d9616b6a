"""Loading, saving, adapters and publishing: a drafter's folder works alone, from anywhere, and holds only the drafter.

Fresh-process tests run a script with an empty Hugging Face home and this package out of reach, so that what they load
is the folder's own code.
"""

import builtins
import importlib.util
import os
import shutil
import socket
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from fresh import run_fresh
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_v4 import MASK_TOKEN_ID, greedy, nightly, random_ids, tiny_drafter_config, tiny_target
from transformers import AutoModel, GenerationConfig, modeling_utils
from transformers.utils import hub

from hyperdflash import target_hyperdflash
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.training.init import init_drafter

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny"
CLOSURE = (
    "configuration_hyperdflash.py",
    "modeling_hyperdflash.py",
    "target_hyperdflash.py",
    "generation_hyperdflash.py",
    "pairing_hyperdflash.py",
)
PUBLISHED = (*CLOSURE, "custom_generate/generate.py")

PRELUDE = """
import sys
sys.modules["hyperdflash"] = None  # the installed package is out of reach
import json, os, pathlib, shutil
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

ids = torch.arange(10)[None] * 5 % 63

def greedy(target, **kwargs):
    return target.generate(ids, do_sample=False, max_new_tokens=12, **kwargs)

def load(path, **kwargs):
    return AutoModel.from_pretrained(path, trust_remote_code=True, **kwargs)

def hidden(drafter):
    generator = torch.Generator().manual_seed(0)
    block, context = torch.randn(1, 4, 32, generator=generator), torch.randn(1, 6, 2, 32, generator=generator)
    with torch.no_grad():
        return drafter.eval()(noise_embeds=block, context_hidden_states=context).last_hidden_state

def count_drafts(drafter):
    calls, draft = [], drafter.draft
    drafter.draft = lambda *args: calls.append(1) or draft(*args)
    return calls
"""


def run_script(script: str, home: Path, *args, cwd: Path) -> None:
    """Run a script in a fresh process with an empty Hugging Face home; its assertions are the test's."""
    run_fresh(PRELUDE + textwrap.dedent(script), home, *args, cwd=cwd)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def saved_target(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "target"
    target.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(saved_target) -> Path:
    """A drafter's folder from `init`."""
    return init_drafter(saved_target, saved_target.with_name("drafter"), mask_token_id=MASK_TOKEN_ID, block_size=4)


def publish(made: Path, folder: Path) -> Path:
    """A folder of the repository's published files, and a drafter's config and weights: nothing else."""
    for name in PUBLISHED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(made / name, folder / name)
    return folder


# -------------------------------------------------------------------------------------------------- in a fresh process


@pytest.mark.slow
def test_published_files_load_alone_from_any_path_before_the_target(made, saved_target, tmp_path):
    """By ".", "./", a relative and an absolute path with space, dot and hyphen, a link, from a read-only folder; the
    config first, the model again and again, then from its config. Nothing is written into the folder. The repository's
    root, which has no weights, loads as a configuration and says how to get them.

    https://github.com/huggingface/transformers/issues/29714 https://github.com/huggingface/transformers/issues/29251
    https://github.com/huggingface/transformers/issues/46661
    """
    folder, root = publish(made, tmp_path / "my drafter v1.2-rc"), publish(made, tmp_path / "root")
    (root / "model.safetensors").unlink()
    shutil.copy(ROOT / "config.json", root)
    (tmp_path / "link").symlink_to(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for path in (*before, folder / "custom_generate", folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    script = """
    config = AutoConfig.from_pretrained(".", trust_remote_code=True)
    assert config.model_type == "hyperdflash"
    here = pathlib.Path.cwd()
    paths = [".", "./", f"../{here.name}", f"../{here.name}/", str(here), here, here.parent / "link"]
    drafters = [load(path) for path in paths]
    expected = hidden(drafters[0])
    assert all(torch.equal(hidden(drafter), expected) for drafter in drafters)
    assert all(type(drafter).config_class.model_type == "hyperdflash" for drafter in drafters)
    assert all(type(drafter).__module__.startswith("transformers_modules.") for drafter in drafters)
    fresh = AutoModel.from_config(config, trust_remote_code=True)
    assert fresh.state_dict().keys() == drafters[0].state_dict().keys()
    assert hidden(fresh).shape == expected.shape

    target = AutoModelForCausalLM.from_pretrained(sys.argv[1])  # loaded after the drafter
    calls = count_drafts(drafters[0])
    assert torch.equal(greedy(target, assistant_model=drafters[0]), greedy(target))
    assert calls

    config = AutoConfig.from_pretrained("../root", trust_remote_code=True)
    assert config.target_name_or_path == "deepseek-ai/DeepSeek-V4-Flash"
    try:
        load("../root")
    except OSError as error:
        assert "hyperdflash init" in str(error) and "root" in str(error), error
    else:
        raise AssertionError("loaded without weights")
    """
    run_script(script, tmp_path / "home", saved_target, cwd=folder)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_custom_generate_and_two_versions_of_the_code_in_one_process(made, saved_target, tmp_path):
    """The target first; then two folders of one name whose code differs, in either order and after saving; and
    `custom_generate`, where a failing import would be swallowed: the drafter must really have been called.

    https://github.com/huggingface/transformers/issues/45698
    """
    for edition in ("first", "second"):
        folder = publish(made, tmp_path / edition / "drafter")
        with (folder / "modeling_hyperdflash.py").open("a") as file:
            file.write(f"\n\nHyperDFlashModel.edition = lambda self: {edition!r}\n")
    script = """
    target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    plain = greedy(target)
    for order in (["first", "second"], ["second", "first"]):
        drafters = {edition: load(f"{edition}/drafter") for edition in order}
        for edition, drafter in drafters.items():
            assert drafter.edition() == edition
            drafter.save_pretrained(f"saved-{edition}")
        for edition in order:
            again = load(f"saved-{edition}")
            assert again.edition() == drafters[edition].edition() == edition
            calls = count_drafts(again)
            assert torch.equal(greedy(target, assistant_model=again), plain)
            assert calls

    drafter = load("first/drafter")
    calls = count_drafts(drafter)
    folder = {"custom_generate": "first/drafter", "trust_remote_code": True}
    assert torch.equal(greedy(target, assistant_model=drafter, **folder), plain)
    rounds = len(calls)
    assert rounds
    assert torch.equal(greedy(target, assistant_model=drafter), plain)
    assert len(calls) == 2 * rounds  # the same path, so the same rounds
    for wrong in ({}, {"assistant_model": target}):
        try:
            greedy(target, **folder, **wrong)
        except ValueError as error:
            assert "AutoModel.from_pretrained" in str(error) and "assistant_model=drafter" in str(error)
        else:
            raise AssertionError("custom_generate ran without a drafter")
    """
    run_script(script, tmp_path / "home", saved_target, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drafter", nightly("drafter-paper")])
def test_a_folder_that_links_its_code_loads_drafts_and_is_saved_as_plain_files(name, tmp_path):
    """Those of examples/tiny do; symbolic links must not be needed by whoever copies what was saved."""
    script = """
    target, folder = AutoModelForCausalLM.from_pretrained(sys.argv[1]), sys.argv[2]
    plain = greedy(target)

    def rounds(drafter, **kwargs):
        out = greedy(target, assistant_model=drafter, return_dict_in_generate=True, **kwargs)
        assert torch.equal(out.sequences, plain)
        return out.speculation.num_drafts

    drafter = load(folder)
    assert type(drafter).__module__.startswith("transformers_modules.")
    expected = rounds(drafter)
    assert expected
    assert rounds(drafter, custom_generate=folder, trust_remote_code=True) == expected
    drafter.save_pretrained("saved")
    assert len(list(pathlib.Path("saved").glob("*.py"))) == 5
    assert rounds(load("saved")) == expected
    assert not any(path.is_symlink() for path in pathlib.Path.cwd().rglob("*.py"))
    """
    assert (TINY / name / "modeling_hyperdflash.py").is_symlink()
    run_script(script, tmp_path / "home", TINY / "target", TINY / name, cwd=tmp_path)


@pytest.mark.slow
def test_a_hub_repository_loads_offline_with_code_and_weights_of_one_revision(made, saved_target, tmp_path):
    """Sockets are blocked; two commits differ in code and weights.

    https://github.com/huggingface/transformers/issues/34855 https://github.com/huggingface/transformers/pull/23799
    """
    repo = tmp_path / "home" / "hf" / "hub" / "models--org--drafter"
    (repo / "refs").mkdir(parents=True)
    commits = {"main": "a" * 40, "first": "b" * 40}
    for ref, commit in commits.items():
        (repo / "refs" / ref).write_text(commit)
        snapshot = publish(made, repo / "snapshots" / commit)
        with (snapshot / "generation_hyperdflash.py").open("a") as file:
            file.write(f"\n\nHyperDFlashAssistant.edition = lambda self: {ref!r}\n")
        weights = load_file(snapshot / "model.safetensors")
        weights["norm.weight"].fill_({"main": 1.0, "first": 2.0}[ref])
        (snapshot / "model.safetensors").unlink()
        save_file(weights, snapshot / "model.safetensors", metadata={"format": "pt"})
    script = """
    import socket
    def blocked(*args, **kwargs):
        raise AssertionError("offline, but the network was used")
    socket.socket.connect = socket.create_connection = socket.getaddrinfo = blocked

    target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    plain = greedy(target)
    main, first = sys.argv[2:4]
    for revision, edition in ((None, "main"), ("first", "first"), (first, "first"), (None, "main"), (main, "main")):
        drafter = load("org/drafter", **({"revision": revision} if revision else {}))
        assert drafter.edition() == edition
        assert drafter.norm.weight.unique().tolist() == [{"main": 1.0, "first": 2.0}[edition]]
        calls = count_drafts(drafter)
        assert torch.equal(greedy(target, assistant_model=drafter), plain)
        assert calls
    calls.clear()
    hub = {"custom_generate": "org/drafter", "trust_remote_code": True, "revision": "first"}
    assert torch.equal(greedy(target, assistant_model=drafter, **hub), plain)
    assert calls
    try:
        load("org/absent")
    except OSError as error:
        assert "org/absent" in str(error) or "cached" in str(error), error
    else:
        raise AssertionError("a repository that is not in the cache was loaded")
    """
    run_script(script, tmp_path / "home", saved_target, commits["main"], commits["first"], cwd=tmp_path)


@pytest.mark.slow
def test_a_drafter_of_auto_model_is_its_modules_class_and_can_be_pickled(made, tmp_path):
    """By `torch.save`, and to a process that is spawned, as Ray and DataLoader workers do."""
    publish(made, tmp_path / "drafter")
    script = """
    import multiprocessing, pickle
    drafter = load("drafter")
    cls = getattr(sys.modules[type(drafter).__module__], "HyperDFlashModel")
    assert type(drafter) is cls
    assert "GenerationMixin" not in str(cls.__mro__)
    torch.save(drafter, "drafter.pt")
    again = torch.load("drafter.pt", weights_only=False)
    assert torch.equal(hidden(again), hidden(drafter))
    worker = multiprocessing.get_context("spawn").Process(target=pickle.dumps, args=(drafter,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    """
    run_script(script, tmp_path / "home", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["AutoConfig", "AutoModel"])
def test_another_transformers_is_one_sentence_when_the_code_is_loaded(made, tmp_path, loader):
    publish(made, tmp_path / "drafter")
    script = f"""
    import transformers
    sys.modules["transformers"].__version__ = "5.23.0"
    try:
        {loader}.from_pretrained("drafter", trust_remote_code=True)
    except ImportError as error:
        assert "HyperDFlash needs transformers 5.24.0 or later, and 5.23.0 is installed" in str(error), error
    else:
        raise AssertionError("loaded without a word")
    """
    run_script(script, tmp_path / "home", cwd=tmp_path)


@pytest.mark.slow
def test_checkpoints_and_merged_adapters_of_a_folder_load_alone(made, tmp_path):
    """Train from a folder with saves, and merge an adapter; delete the folder; load both in another process.

    https://github.com/huggingface/transformers/issues/46165 https://github.com/yangjianxin1/Firefly/issues/118
    https://github.com/lightseekorg/TorchSpec/issues/38 https://github.com/huggingface/transformers/issues/33807
    """
    publish(made, tmp_path / "source")
    script = """
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    class Norms(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return model(**inputs).last_hidden_state.square().mean()

    def rows(seed):
        generator = torch.Generator().manual_seed(seed)
        return {"noise_embeds": torch.randn(4, 32, generator=generator),
                "context_hidden_states": torch.randn(6, 2, 32, generator=generator)}

    drafter = load("source")
    arguments = TrainingArguments("run", max_steps=2, save_steps=1, per_device_train_batch_size=2, use_cpu=True,
                                  remove_unused_columns=False, report_to="none", learning_rate=0.1)
    Norms(drafter, arguments, train_dataset=[rows(i) for i in range(4)]).train()
    optimizer = torch.load("run/checkpoint-1/optimizer.pt")
    moments = sum(state["exp_avg"].numel() for state in optimizer["state"].values())
    assert moments == sum(p.numel() for p in drafter.parameters())

    adapted = get_peft_model(load("source"), LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))
    torch.save(hidden(adapted), "adapted.pt")
    assert not torch.allclose(hidden(adapted), hidden(load("source")))
    adapted.merge_and_unload().save_pretrained("merged")
    """
    run_script(script, tmp_path / "home", cwd=tmp_path)
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tmp_path / "home")
    own = load_file(made / "model.safetensors").keys()
    for folder in ("run/checkpoint-1", "run/checkpoint-2", "merged"):
        assert {name for name in CLOSURE if (tmp_path / folder / name).is_file()} == set(CLOSURE)
        assert load_file(tmp_path / folder / "model.safetensors").keys() == own
    script = """
    first, second, merged = (load(path) for path in ("run/checkpoint-1", "run/checkpoint-2", "merged"))
    assert not torch.equal(hidden(first), hidden(second))
    torch.testing.assert_close(hidden(merged), torch.load("adapted.pt"), atol=1e-5, rtol=1e-5)
    """
    run_script(script, tmp_path / "home", cwd=tmp_path)


# ------------------------------------------------------------------------------------- what a folder must and may hold


def rewrite(made: Path, folder: Path, change) -> Path:
    """A copy of a drafter's folder with changed weights."""
    shutil.copytree(made, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("reducer.hc_fn"), "missing keys: reducer.hc_fn"),
        (lambda w: w.update({"reducer.fn": w.pop("reducer.hc_fn")}), "missing keys: reducer.hc_fn"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(64, 32)}), "unexpected keys: lm_head.weight"),
        (lambda w: w.update({"norm.weight": torch.ones(16)}), r"mismatched keys: .*norm.weight.*16.*32"),
    ],
    ids=["missing", "renamed", "unexpected", "misshaped"],
)
def test_weights_that_do_not_fit_are_refused_by_name(made, tmp_path, change, named):
    """https://github.com/lightseekorg/TorchSpec/issues/38"""
    folder = rewrite(made, tmp_path / "odd", change)
    with pytest.raises(ValueError, match=f"odd does not fit its config: {named}"):
        HyperDFlashModel.from_pretrained(folder)


def test_a_folder_without_weights_is_refused_with_the_remedy(made, tmp_path):
    shutil.copy(made / "config.json", tmp_path)
    with pytest.raises(OSError, match="no weights of a drafter.*hyperdflash init"):
        HyperDFlashModel.from_pretrained(tmp_path)


def test_only_the_drafters_own_tensors_are_stored_also_after_generate(target, made, tmp_path):
    """Before and after the drafter worked with a target; both saves succeed and hold the same names.

    https://github.com/lightseekorg/TorchSpec/issues/38 https://github.com/huggingface/transformers/issues/33807
    https://github.com/huggingface/transformers/issues/44861 https://github.com/huggingface/transformers/pull/43951
    """
    drafter, info = HyperDFlashModel.from_pretrained(made, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    own = {name for name, _ in drafter.named_parameters()}
    assert set(drafter.state_dict()) == own  # no persistent buffers
    drafter.save_pretrained(tmp_path / "before")
    greedy(target, random_ids(6), 8, assistant_model=drafter)
    drafter.save_pretrained(tmp_path / "after")
    for folder in ("before", "after"):
        stored = load_file(tmp_path / folder / "model.safetensors")
        assert set(stored) == own
        assert sum(t.numel() for t in stored.values()) == drafter.num_parameters()
        assert not [t for t in stored.values() if t.shape == target.get_input_embeddings().weight.shape]
    assert drafter._tied_weights_keys is None or isinstance(drafter._tied_weights_keys, dict)
    assert drafter.all_tied_weights_keys == {}  # set by post_init


def test_a_generation_config_that_does_not_validate_hinders_no_save(target, made, tmp_path):
    """https://github.com/huggingface/transformers/issues/29988"""
    drafter = HyperDFlashModel.from_pretrained(made)
    drafter.generation_config = GenerationConfig(temperature=0.6, do_sample=False)
    before, target.generation_config = target.generation_config, GenerationConfig(temperature=0.6, do_sample=False)
    try:
        greedy(target, random_ids(6), 4, assistant_model=drafter)
        drafter.save_pretrained(tmp_path / "out")
    finally:
        target.generation_config = before
    assert not (tmp_path / "out" / "generation_config.json").exists()
    HyperDFlashModel.from_pretrained(tmp_path / "out")


# -------------------------------------------------------------------------------------------- construction and loading


def rotary(drafter) -> list[torch.Tensor]:
    return [drafter.rotary_emb.inv_freq, drafter.rotary_emb.original_inv_freq]


def assert_same_buffers(drafter, expected) -> None:
    names = {name for name, _ in drafter.named_buffers()}
    assert names == {name for name, _ in expected.named_buffers()} != set()
    for name, buffer in drafter.named_buffers():
        assert torch.equal(buffer, expected.get_buffer(name)), name


@pytest.mark.parametrize(
    "options", [{}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}], ids=["plain", "map", "bf16"]
)
def test_buffers_after_loading_are_those_of_a_built_model(target, made, options):
    """They are not stored; freed memory full of 1e30 must not show in them.

    https://github.com/macwiatrak/Bacformer/pull/36
    """
    built = HyperDFlashModel(HyperDFlashModel.from_pretrained(made).config)
    for _ in range(5):
        waste = [torch.full((size,), 1e30) for size in (4, 8, 16, 64, 1024, 1 << 16) for _ in range(20)]
        del waste
        assert_same_buffers(HyperDFlashModel.from_pretrained(made, **options), built)


def test_buffers_after_to_empty_and_the_init_hook_are_right(target):
    """https://github.com/macwiatrak/Bacformer/pull/36"""
    config = tiny_drafter_config(target)
    with torch.device("meta"):
        drafter = HyperDFlashModel(config)
    drafter.to_empty(device="cpu")
    for buffer in drafter.buffers():
        buffer.fill_(1e30)
    drafter.apply(drafter._init_weights)
    assert_same_buffers(drafter, HyperDFlashModel(config))


def test_the_constructor_opens_no_file_and_no_connection(target, monkeypatch):
    """https://github.com/alanarazi7/TabSTAR/pull/44 https://github.com/huggingface/transformers/pull/45096"""
    config = tiny_drafter_config(target, target_name_or_path="absent/target")

    def refuse(*args, **kwargs):
        raise AssertionError(f"opened {args}")

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert HyperDFlashModel(config).config is config


@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.bfloat16, torch.float16])
def test_the_asked_dtype_holds_for_all_but_gate_and_rotary_tables(made, tmp_path, dtype):
    """https://github.com/huggingface/transformers/issues/40513 https://github.com/huggingface/transformers/pull/43683"""
    drafter = HyperDFlashModel.from_pretrained(made, dtype=dtype)
    expected = torch.float32 if dtype == "auto" else dtype
    kept = {"reducer.hc_fn", "reducer.hc_base", "reducer.hc_scale", "reducer.path_norm"}
    assert kept <= {name for name, _ in drafter.named_parameters()}
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == (torch.float32 if name in kept else expected), name
    assert {buffer.dtype for buffer in rotary(drafter)} == {torch.float32}
    drafter.save_pretrained(tmp_path / "out")
    again = HyperDFlashModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert {n: p.dtype for n, p in again.named_parameters()} == {n: p.dtype for n, p in drafter.named_parameters()}
    assert again.config.dtype == again.dtype == drafter.dtype == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_drafter_of_another_dtype_changes_no_token(target, made, dtype):
    """https://github.com/huggingface/transformers/issues/40513"""
    drafter, ids = HyperDFlashModel.from_pretrained(made, dtype=dtype), random_ids(7)
    assert torch.equal(greedy(target, ids, 16, assistant_model=drafter), greedy(target, ids, 16))


def test_an_fp32_drafter_works_for_a_bf16_target(made):
    """https://github.com/huggingface/transformers/issues/40513"""
    target, ids = tiny_target().bfloat16(), random_ids(7)
    drafter = HyperDFlashModel.from_pretrained(made)
    assert torch.equal(greedy(target, ids, 16, assistant_model=drafter), greedy(target, ids, 16))


# ------------------------------------------------------------------------------------------------------------ adapters


TASKS = pytest.mark.parametrize("task_type", [None, "FEATURE_EXTRACTION", "CAUSAL_LM"])


@TASKS
@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], "all-linear"], ids=["by name", "all"])
def test_an_adapter_trains_alone_and_drafts(target, made, task_type, modules):
    """https://github.com/huggingface/peft/issues/2769"""
    drafter = HyperDFlashModel.from_pretrained(made)
    adapted = get_peft_model(drafter, LoraConfig(task_type=task_type, target_modules=modules, r=2))
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    block, context = torch.randn(1, 4, 32), torch.randn(1, 6, 2, 32)
    adapted(noise_embeds=block, context_hidden_states=context).last_hidden_state.square().sum().backward()
    optimizer.step()
    changed = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)

    calls, draft = [], drafter.draft
    drafter.draft = lambda *args: calls.append(1) or draft(*args)
    ids = random_ids(7)
    assert torch.equal(greedy(target, ids, 12, assistant_model=adapted), greedy(target, ids, 12))
    assert calls


def test_the_gate_is_trained_beside_an_adapter_by_modules_to_save(made, tmp_path):
    """Its parameters are bare, so no adapter reaches them."""
    adapted = get_peft_model(
        HyperDFlashModel.from_pretrained(made), LoraConfig(target_modules="all-linear", modules_to_save=["reducer"])
    )
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad and "hc_fn" in name}
    assert len(trained) == 1
    adapted.save_pretrained(tmp_path)
    assert [name for name in load_file(tmp_path / "adapter_model.safetensors") if name.endswith("hc_fn")]


def test_a_drafter_itself_refuses_to_generate(made):
    """https://github.com/huggingface/peft/issues/2769"""
    drafter = HyperDFlashModel.from_pretrained(made)
    assert not drafter.can_generate()
    for method in (drafter.prepare_inputs_for_generation, drafter.generate):
        with pytest.raises(NotImplementedError, match=r"does not generate by itself: .*generate\(assistant_model="):
            method(random_ids(3), max_new_tokens=3)


def test_misspelt_arguments_of_forward_are_refused_and_hidden_states_returned(made):
    """Both vanished without a word."""
    drafter = HyperDFlashModel.from_pretrained(made).eval()
    inputs = {"noise_embeds": torch.randn(1, 4, 32), "context_hidden_states": torch.randn(1, 6, 2, 32)}
    with pytest.raises(TypeError, match="no argument positions, output_attentions"):
        drafter(**inputs, positions=torch.arange(10)[None], output_attentions=True)
    with torch.no_grad():
        output = drafter(**inputs, output_hidden_states=True, labels=None)
    assert len(output.hidden_states) == drafter.config.num_hidden_layers + 1
    assert torch.equal(output.hidden_states[0], inputs["noise_embeds"])
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    assert drafter(**inputs).hidden_states is None


def test_adapter_and_base_load_after_both_were_moved(made, tmp_path):
    """With the base given; loading by the adapter alone names the base that is gone, in one error.

    https://github.com/huggingface/transformers/pull/43760
    """
    shutil.copytree(made, tmp_path / "base")
    config = LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    adapted = get_peft_model(HyperDFlashModel.from_pretrained(tmp_path / "base"), config)
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "moved").mkdir()
    for name in ("base", "adapter"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    base = HyperDFlashModel.from_pretrained(tmp_path / "moved" / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "moved" / "adapter")
    for name, value in adapted.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    with pytest.raises(OSError, match=str(tmp_path / "base")):
        AutoModel.from_pretrained(tmp_path / "moved" / "adapter", trust_remote_code=True)


# ---------------------------------------------------------------------------------------------------------- publishing


class RecordingHub:
    """Stands in for `HfApi`: keeps what each commit would upload."""

    def __init__(self):
        self.commits = []

    def create_repo(self, repo_id, **kwargs):
        return type("Repo", (), {"repo_id": repo_id})

    def create_commit(self, operations, **kwargs):
        self.commits.append({op.path_in_repo: op.upload_info.sha256 for op in operations})


def test_a_push_uploads_code_config_weights_and_card_and_nothing_else(target, made, monkeypatch):
    """A second push of the same drafter has the same contents, which the Hub then does not take again.

    https://github.com/huggingface/transformers/pull/37716
    """
    drafter, api = HyperDFlashModel.from_pretrained(made), RecordingHub()
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: hub.ModelCard("a card"))
    drafter.push_to_hub("someone/drafter")
    greedy(target, random_ids(5), 4, assistant_model=drafter)
    drafter.push_to_hub("someone/drafter")
    first, second = api.commits
    assert set(first) == {*PUBLISHED, "config.json", "model.safetensors", "README.md"}
    assert second == first


def test_saving_with_a_push_uploads_custom_generate_too(made, tmp_path, monkeypatch):
    """Also into a folder that was saved to before, of which the library uploads what has changed."""
    drafter, api = HyperDFlashModel.from_pretrained(made), RecordingHub()
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr(modeling_utils, "hf_api", lambda: api)
    monkeypatch.setattr(modeling_utils, "create_and_tag_model_card", lambda *args, **kwargs: hub.ModelCard("a card"))
    drafter.save_pretrained(tmp_path / "out")
    drafter.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="someone/drafter")
    assert "custom_generate/generate.py" in api.commits[0]


def test_a_saved_drafter_brings_custom_generate_and_can_be_read_by_others(made, tmp_path):
    """safetensors writes files with mode 0600."""
    before = os.umask(0o022)
    try:
        HyperDFlashModel.from_pretrained(made).save_pretrained(tmp_path / "out")
    finally:
        os.umask(before)
    saved = (tmp_path / "out" / "custom_generate" / "generate.py").read_bytes()
    assert saved == (ROOT / "custom_generate" / "generate.py").read_bytes()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o644 for path in files}


def test_a_process_that_is_not_the_main_one_writes_nothing(made, tmp_path):
    HyperDFlashModel.from_pretrained(made).save_pretrained(tmp_path / "out", is_main_process=False)
    assert not list((tmp_path / "out").rglob("*"))


def test_git_ignores_nothing_that_belongs_in_a_published_folder(tmp_path):
    """`hf upload` honours a folder's .gitignore, so a rule for weights would drop them without a word."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def is_ignored(name: str) -> bool:
        return subprocess.run(["git", "-C", tmp_path, "check-ignore", "-q", name], check=False).returncode == 0

    weights = ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json")
    wanted = (*PUBLISHED, *weights, "config.json", "README.md", "command.txt", "tokenizer.json")
    assert [name for name in wanted if is_ignored(name)] == []
    assert [name for name in wanted if is_ignored(f"examples/tiny/drafter/{name}")] == []
    assert is_ignored("__pycache__/configuration_hyperdflash.cpython-311.pyc")


def test_a_class_that_transformers_lacks_is_named_in_the_import_error(monkeypatch):
    """The class, not its module, which is there."""
    monkeypatch.delattr("transformers.cache_utils.DynamicSlidingWindowLayer")
    spec = importlib.util.spec_from_file_location("hyperdflash.target_again", target_hyperdflash.__file__)
    with pytest.raises(ImportError, match="lacks what HyperDFlash builds on: .*'DynamicSlidingWindowLayer'.*tested"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
