"""Export: what a run wrote becomes one self-contained Hub folder, whole or not at all, with a card of the run's facts.

Runs are made by hand as transformers' Trainer writes them; the trainer itself is not needed here.
"""

import hashlib
import json
import re
import shutil
import stat
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from fresh import run_fresh
from huggingface_hub import CommitInfo, HfApi, ModelCard, hf_api
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_v4 import greedy, random_ids, tiny_drafter, tiny_target
from transformers.utils import hub

from hyperdflash import __main__ as cli
from hyperdflash.generation.demo import TINY
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.training import export, run_folder
from hyperdflash.training import model_card as card
from hyperdflash.training.export import export_drafter

GATE = ("hc_fn", "hc_base", "hc_scale", "path_norm")
CODE = {
    "configuration_hyperdflash.py",
    "modeling_hyperdflash.py",
    "target_hyperdflash.py",
    "generation_hyperdflash.py",
    "pairing_hyperdflash.py",
    "encoding_deepseek_v4.py",
    "custom_generate/generate.py",
}
DRAFTER = CODE | {"config.json", "model.safetensors", "README.md"}
FACTS = {
    "target": "deepseek-ai/DeepSeek-V4-Flash",
    "target_revision": "0123456789abcdef",
    "train_data": [{"file": "/home/somebody/chat.jsonl", "sha256": "a1" * 32}],
    "eval_data": [{"file": "held-out.jsonl", "sha256": "b2" * 32}],
    "data_report": ["9 of 10 rows kept", "1 left out: no supervised token"],
    "mode": "thinking",
    "effort": "high",
    "generation": "0731",
    "num_parameters": 12345,
    "num_trainable_parameters": 12345,
    "block_size": 4,
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "finished": True,
}
RECIPE = {
    "output_dir": "/home/somebody/runs/stage2",
    "learning_rate": 1e-4,
    "metric_for_best_model": "eval_acceptance_length",
    "eval_decode_prompts": 8,
    "init_from": "/home/somebody/runs/stage1",
    "hub_token": "hf_abcdefghijklmnopqrstuvwxyz",
    "drafter": {"block_size": 4},
    "lr_scheduler_kwargs": {"file": "/home/somebody/other/x.json"},
}
COMMAND = "hyperdflash train /home/somebody/stage2.yaml hub_token=hf_abcdefghijklmnopqrstuvwxyz seed=1\n"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def log_history(last_step: int) -> list[dict]:
    """Two steps a logged line, an evaluation every four; the acceptance length peaks at step 4."""
    log = []
    for step in range(2, last_step + 1, 2):
        line = {"loss": 4 / step, "ce": 3 / step, "kl": 1 / step, "expected_acceptance_length": 1 + step / 8}
        log.append({"step": step, "epoch": step / 4, "tokens_per_second": 1000.0 + step, **line})
        if step % 4 == 0:
            evaluation = {"eval_loss": 4.25 / step, "eval_ce": 3.5, "eval_kl": 0.75}
            evaluation |= {"eval_expected_acceptance_length": 2.125, "eval_acceptance_length": 3.75 - step / 8}
            evaluation |= {f"eval_slot_accuracy_{k}": 0.9 - k / 10 for k in (1, 2, 3)}
            evaluation |= {f"eval_acceptance_rate_{k}": 0.85 - k / 5 for k in (1, 2, 3)}
            log.append({"step": step, "epoch": step / 4, **evaluation})
    return log


def write_state(folder: Path, step: int, best: str | None = None) -> None:
    state = {"global_step": step, "max_steps": 8, "epoch": step / 4, "log_history": log_history(step)}
    state["best_model_checkpoint"] = best and f"/elsewhere/{folder.parent.name}/{best}"
    (folder / "trainer_state.json").write_text(json.dumps(state))


def write_checkpoint(run: Path, model, step: int, best: str | None = None) -> Path:
    """A checkpoint as the Trainer leaves it: weights, pickles, and the state last of all."""
    folder = run / f"checkpoint-{step}"
    model.save_pretrained(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"step": step}, folder / name)
    write_state(folder, step, best)
    return folder


def trained(target, seed: int) -> HyperDFlashModel:
    """A drafter whose weights are no bf16 numbers, made for a target of the Hub."""
    drafter = tiny_drafter(target, seed=seed)
    with torch.no_grad():
        for i, parameter in enumerate(drafter.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)), alpha=0.01)
    drafter.config.target_name_or_path = FACTS["target"]
    drafter.config.target_revision = FACTS["target_revision"]
    return drafter


def write_run_files(run: Path, **facts) -> None:
    (run / "run.json").write_text(json.dumps({**FACTS, **facts}))
    (run / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (run / "command.txt").write_text(COMMAND)


@pytest.fixture
def run(target, tmp_path) -> Path:
    """Two whole checkpoints, seeds 4 and 8; nothing says which is best."""
    folder = tmp_path / "run"
    for step in (4, 8):
        write_checkpoint(folder, trained(target, step), step)
    write_run_files(folder)
    return folder


@pytest.fixture(scope="module")
def exported(target, tmp_path_factory) -> Path:
    """The export of such a run's only checkpoint, for tests that only look."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    write_checkpoint(folder, trained(target, 8), 8)
    write_run_files(folder)
    return export_drafter(folder, folder.with_name("out"))


def rounded(drafter: HyperDFlashModel) -> dict[str, torch.Tensor]:
    """What is to be stored: bf16, and the gate as it was trained."""
    return {
        name: value.float() if name.rsplit(".", 1)[-1] in GATE else value.bfloat16()
        for name, value in drafter.state_dict().items()
    }


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        assert stored[name].dtype == value.dtype, name
        assert torch.equal(stored[name], value), name


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def read_card(folder: Path) -> str:
    return (folder / "README.md").read_text()


# ------------------------------------------------------------------------------------------------ which weights, how


def test_the_last_checkpoint_of_a_run_is_exported_in_bf16_with_the_gate_in_fp32(target, run, tmp_path):
    out = export_drafter(run, tmp_path / "deep" / "out")
    assert out == tmp_path / "deep" / "out"
    drafter = trained(target, 8)
    assert not torch.equal(drafter.reducer.hc_fn, drafter.reducer.hc_fn.bfloat16().float())
    assert_holds(out, rounded(drafter))
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_best_checkpoint_is_chosen_also_after_the_run_was_moved(target, run, tmp_path):
    write_state(run / "checkpoint-8", 8, best="checkpoint-4")
    run = run.rename(tmp_path / "moved")
    assert_holds(export_drafter(run, tmp_path / "out"), rounded(trained(target, 4)))


@pytest.mark.parametrize("damage", ["no state", "half a state", "no log"])
def test_a_checkpoint_cut_short_is_passed_over_and_refused_by_name(target, run, tmp_path, damage):
    """https://github.com/vllm-project/speculators/pull/912"""
    cut = write_checkpoint(run, trained(target, 12), 12)
    state = (cut / "trainer_state.json").read_text()
    (cut / "trainer_state.json").unlink()
    if damage != "no state":
        (cut / "trainer_state.json").write_text(state[: len(state) // 2] if damage == "half a state" else "{}")
    assert_holds(export_drafter(run, tmp_path / "out"), rounded(trained(target, 8)))
    with pytest.raises(ValueError, match=r"checkpoint-12 was cut short.*Export .*run for its last complete"):
        export_drafter(cut, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_checkpoints_are_ordered_by_step_and_other_folders_are_none(target, run, tmp_path):
    write_checkpoint(run, trained(target, 16), 16)  # as text, 16 sorts before 4
    shutil.copytree(run / "checkpoint-4", run / "checkpoint-99-mine")
    assert_holds(export_drafter(run, tmp_path / "out"), rounded(trained(target, 16)))


def test_a_named_checkpoint_and_a_plain_drafter_are_exported_as_they_are(target, run, tmp_path):
    assert_holds(export_drafter(run / "checkpoint-4", tmp_path / "first"), rounded(trained(target, 4)))
    trained(target, 3).save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 1
    assert_holds(export_drafter(tmp_path / "plain", tmp_path / "second"), rounded(trained(target, 3)))
    assert_holds(export_drafter(tmp_path / "first", tmp_path / "again"), rounded(trained(target, 4)))


def test_a_merged_adapter_has_the_adapted_weights_and_the_gate_that_was_trained(target, tmp_path):
    """The reducer is trained whole, everything else by low-rank matrices; merged in fp32, rounded once.

    https://github.com/huggingface/peft/issues/899
    """
    trained(target, 1).save_pretrained(tmp_path / "base")
    base = HyperDFlashModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    options = LoraConfig(
        target_modules="all-linear", r=2, lora_alpha=6, init_lora_weights=False, modules_to_save=["reducer"]
    )
    adapted = get_peft_model(base, options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(1 / 3)
    write_checkpoint(tmp_path / "run", adapted, 4)
    out = export_drafter(tmp_path / "run", tmp_path / "out")

    expected = trained(target, 1).state_dict()
    for name, value in expected.items():
        if name.startswith("reducer."):
            value.add_(1 / 3)
        elif value.ndim == 2:
            layer = base.get_submodule(name.removesuffix(".weight"))
            value.add_(3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight)  # lora_alpha / r
    plain = trained(target, 1)
    plain.load_state_dict(expected)
    assert_holds(out, rounded(plain))
    assert set(files_of(out)) == DRAFTER | {"training.png"}
    assert "merged from a LoRA adapter" in read_card(out)


def test_an_adapter_without_its_drafter_or_for_another_one_is_refused(target, tmp_path):
    trained(target, 1).save_pretrained(tmp_path / "base")
    base = HyperDFlashModel.from_pretrained(tmp_path / "base")
    adapter = write_checkpoint(tmp_path / "run", get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2)), 4)
    weights = load_file(adapter / "adapter_model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.1" not in name}
    save_file(kept, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"adapter in .*checkpoint-4 does not fit .*base: .*layers\.1.*lora_A"):
        export_drafter(adapter, tmp_path / "out")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(OSError, match=r"base, which the adapter in .*checkpoint-4 .*base_model_name_or_path"):
        export_drafter(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_merged_into_the_drafter_that_its_run_keeps(target, tmp_path):
    """A new drafter, which has no name; its configuration, which an adapter does not have, comes along."""
    drafter = trained(target, 1)
    drafter.config.encoding = {"generation": "0731", "modes": ["thinking"]}
    drafter.save_pretrained(tmp_path / "run" / "base")
    adapted = get_peft_model(drafter, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    write_checkpoint(tmp_path / "run", adapted, 4)
    (tmp_path / "run").rename(tmp_path / "moved")
    out = export_drafter(tmp_path / "moved", tmp_path / "out")
    assert_holds(out, rounded(adapted.merge_and_unload()))
    assert json.loads((out / "config.json").read_text())["encoding"] == drafter.config.encoding
    (tmp_path / "moved" / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="checkpoint-4 is an adapter that does not name its drafter"):
        export_drafter(tmp_path / "moved", tmp_path / "other")


def test_an_unknown_format_is_refused_by_name(run, tmp_path):
    with pytest.raises(ValueError, match="format is one of hf, vllm, sglang; got 'gguf'"):
        export_drafter(run, tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["hf", "vllm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_exported(run, tmp_path, value, format):
    path = run / "checkpoint-8" / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"][3] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 of \d+ tensors in .*checkpoint-8 have NaN or infinite.*norm\.weight"):
        export_drafter(run, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_weights_with_a_wrappers_prefix_never_get_into_an_export(run, tmp_path, prefix):
    """https://github.com/MakazhanAlpamys/Soup/issues/351"""
    path = run / "checkpoint-8" / "model.safetensors"
    save_file({prefix + name: value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="checkpoint-8 does not fit its config: missing keys"):
        export_drafter(run, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


# ------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.pictures
def test_the_folder_is_complete_readable_by_all_and_without_pickles(exported):
    root, files = Path(__file__).resolve().parents[1], files_of(exported)
    assert set(files) == DRAFTER | {"training.png", "command.txt"}
    for name in CODE:
        assert files[name] == (root / name).read_bytes()
    for name in files:
        assert stat.S_IMODE((exported / name).stat().st_mode) == 0o644, name
    config = json.loads(files["config.json"])
    assert config["auto_map"] == {
        "AutoConfig": "configuration_hyperdflash.HyperDFlashConfig",
        "AutoModel": "modeling_hyperdflash.HyperDFlashModel",
    }
    assert len(files["training.png"]) < 300_000
    assert not [name for name, content in files.items() if b"/home/somebody" in content]


@pytest.mark.pictures
def test_the_same_checkpoint_gives_the_same_bytes(exported, run, tmp_path):
    assert files_of(export_drafter(run, tmp_path / "out")) == files_of(exported)


@pytest.mark.slow
def test_the_folder_loads_alone_in_a_fresh_process_and_drafts_as_the_rounded_weights(target, run, tmp_path):
    """Offline, with the installed package and the run out of reach: the same hidden states bit for bit, and the same
    rounds with the target, through `assistant_model` and through `custom_generate`."""
    export_drafter(run, tmp_path / "out")
    shutil.rmtree(run)
    target.save_pretrained(tmp_path / "target")
    drafter = trained(target, 8)
    drafter.load_state_dict({name: value.float() for name, value in rounded(drafter).items()})
    export.round_to_bf16(drafter)
    generator = torch.Generator().manual_seed(0)
    inputs = {"noise_embeds": torch.randn(1, 4, 32, generator=generator).bfloat16()}
    inputs["context_hidden_states"] = torch.randn(1, 6, 2, 32, generator=generator).bfloat16()
    with torch.no_grad():
        hidden = drafter(**inputs).last_hidden_state
    kwargs = {"return_dict_in_generate": True, "assistant_model": drafter}
    expected = greedy(target, random_ids(9), 24, **kwargs)
    assert torch.equal(expected.sequences, greedy(target, random_ids(9), 24))
    data = {"hidden": hidden, "ids": random_ids(9), "sequences": expected.sequences}
    torch.save({**data, **inputs}, tmp_path / "expected.pt")
    (tmp_path / "rounds.json").write_text(json.dumps(expected.speculation.to_dict()))
    script = """
    import sys
    sys.modules["hyperdflash"] = None
    import json, torch
    from transformers import AutoModel, AutoModelForCausalLM
    torch.set_num_threads(1)
    drafter = AutoModel.from_pretrained("out", trust_remote_code=True)
    expected, rounds = torch.load("expected.pt"), json.load(open("rounds.json"))
    inputs = {name: expected[name] for name in ("noise_embeds", "context_hidden_states")}
    with torch.no_grad():
        assert torch.equal(drafter(**inputs).last_hidden_state, expected["hidden"])
    target = AutoModelForCausalLM.from_pretrained("target")
    kwargs = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True, "assistant_model": drafter}
    for more in ({}, {"custom_generate": "out", "trust_remote_code": True}):
        got = target.generate(expected["ids"], **kwargs, **more)
        assert torch.equal(got.sequences, expected["sequences"])
        assert json.loads(json.dumps(got.speculation.to_dict())) == rounds, (got.speculation.to_dict(), rounds)
    """
    run_fresh(textwrap.dedent(script), tmp_path, cwd=tmp_path)


def snippet(folder: Path) -> str:
    """The code of the card."""
    (code,) = re.findall(r"```python\n(.*?)```", read_card(folder), re.DOTALL)
    return code


@pytest.mark.slow
def test_the_cards_snippet_runs_in_the_folder_without_the_package(run, tmp_path):
    """As it stands, from a string to text, in a process that does not know this package, with the target in the Hub's
    cache under its name and commit."""
    target = tiny_target(vocab_size=4096, eos_token_id=1, pad_token_id=2)
    name, commit = "someone/tiny-v4", "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hf" / "hub" / "models--someone--tiny-v4"
    target.save_pretrained(repository / "snapshots" / commit)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / file, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    drafter = trained(target, 1)
    drafter.config.target_name_or_path, drafter.config.target_revision = name, commit
    drafter.config.encoding = {"generation": "0731", "modes": ["thinking"]}
    drafter.save_pretrained(tmp_path / "plain")
    out = export_drafter(tmp_path / "plain", tmp_path / "out")
    code = snippet(out)
    assert 'mode="thinking", generation="0731", add_generation_prompt=True' in code
    code = f"import sys, torch\nsys.modules['hyperdflash'] = None\ntorch.set_num_threads(1)\n{code}"
    code += "\nassert drafter.device == target.device and output.shape[1] > len(ids)"
    assert run_fresh(code, tmp_path, cwd=out).strip()


def test_the_snippet_names_the_folder_of_a_local_target_and_encodes_as_in_training(target, tmp_path):
    drafter = trained(target, 1)
    drafter.config.target_name_or_path, drafter.config.target_revision = "tiny-v4", None
    drafter.save_pretrained(tmp_path / "plain")
    code = snippet(export_drafter(tmp_path / "plain", tmp_path / "out"))
    compile(code, "the card", "exec")
    assert 'target_name = "<the folder of tiny-v4>"\n' in code
    assert "encode(messages, tokenizer, add_generation_prompt=True)" in code
    assert ".to(target.device)" in code
    assert "Tested with transformers 5.24.0" in read_card(tmp_path / "out")


class RecordingApi(HfApi):
    """Keeps what a commit would upload."""

    def create_commit(self, repo_id, operations, **kwargs):
        self.uploaded = {op.path_in_repo: op.upload_info.sha256 for op in operations}
        return CommitInfo(
            commit_url="https://huggingface.co/someone/drafter/commit/0",
            commit_message="",
            commit_description="",
            oid="",
        )

    def _validate_yaml(self, content, **kwargs):
        """The Hub checks the header of a README before a commit."""
        assert ModelCard(content).data.license == "apache-2.0"

    def create_repo(self, repo_id, **kwargs):
        return type("Repo", (), {"repo_id": repo_id})


def test_an_upload_of_the_folder_has_weights_code_card_picture_and_command(exported, monkeypatch):
    api = RecordingApi()
    monkeypatch.setattr(hf_api, "is_xet_available", lambda: False)  # its uploads are the same files in other pieces
    api.upload_folder(repo_id="someone/drafter", folder_path=exported)
    assert set(api.uploaded) == DRAFTER | {"training.png", "command.txt"}

    whole = api.uploaded
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: hub.ModelCard("a card"))
    HyperDFlashModel.from_pretrained(exported).push_to_hub("someone/drafter")
    pushed = {name: digest for name, digest in api.uploaded.items() if name != "README.md"}
    assert pushed.items() <= whole.items()
    assert "model.safetensors" in pushed


def test_code_that_a_drafters_folder_links_is_written_and_uploaded_as_files(tmp_path, monkeypatch):
    """The drafters of examples/tiny do."""
    assert (TINY / "drafter" / "modeling_hyperdflash.py").is_symlink()
    out = export_drafter(TINY / "drafter", tmp_path / "out")
    assert files_of(out).keys() >= DRAFTER
    assert not any(path.is_symlink() for path in out.rglob("*"))
    api = RecordingApi()
    monkeypatch.setattr(hf_api, "is_xet_available", lambda: False)
    api.upload_folder(repo_id="someone/drafter", folder_path=TINY / "drafter")
    for name in CODE:
        code = (out / name).read_bytes()
        assert code == (TINY.parents[1] / name).read_bytes()
        assert api.uploaded[name] == hashlib.sha256(code).digest()


# ------------------------------------------------------------------------------------------------ whole or not at all


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError("No space left on device")])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_midway_leaves_nothing_behind_and_an_earlier_export_as_it_was(
    run, tmp_path, monkeypatch, error, overwrite
):
    if overwrite:
        export_drafter(run / "checkpoint-4", tmp_path / "out")
    before = files_of(tmp_path)

    def fail(folder, *args):
        assert (folder / "model.safetensors").is_file()
        raise error

    monkeypatch.setattr(export, "write_card", fail)
    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        export_drafter(run, tmp_path / "out", overwrite=overwrite)
    assert files_of(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == (["out", "run"] if overwrite else ["run"])


def test_a_folder_in_use_is_refused_and_untouched(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    before = files_of(tmp_path)
    for overwrite in (False, True):  # only a drafter's folder is ever replaced
        with pytest.raises(FileExistsError, match="out exists and is not an empty folder"):
            export_drafter(run, tmp_path / "out", overwrite=overwrite)
    for output in (run / "checkpoint-8", run):
        with pytest.raises((FileExistsError, ValueError), match=r"exists and is not|holds the checkpoint itself"):
            export_drafter(run / "checkpoint-8", output, overwrite=output != run)
    assert files_of(tmp_path) == before


def test_a_drafters_folder_is_replaced_when_asked(target, run, tmp_path):
    export_drafter(run / "checkpoint-4", tmp_path / "out")
    (tmp_path / "out" / "stale.txt").touch()
    out = export_drafter(run, tmp_path / "out", overwrite=True)
    assert_holds(out, rounded(trained(target, 8)))
    assert set(files_of(out)) == DRAFTER | {"training.png", "command.txt"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def break_weights(run: Path) -> None:
    path = run / "checkpoint-8" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:4000])


def leave_fsdp_shards(run: Path) -> None:
    (run / "checkpoint-8" / "pytorch_model_fsdp_0").mkdir()
    for name in ("model.safetensors", "config.json"):
        (run / "checkpoint-8" / name).unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (shutil.rmtree, "run is not a folder"),
        (break_weights, r"checkpoint-8/model\.safetensors is not a readable safetensors"),
        (
            lambda run: (run / "checkpoint-8" / "model.safetensors").unlink(),
            "checkpoint-8 holds no weights of a drafter",
        ),
        (
            lambda run: write_state(run / "checkpoint-8", 8, best="checkpoint-2"),
            "checkpoint-2, the best .* is missing",
        ),
        (lambda run: [p.unlink() for p in run.glob("*/trainer_state.json")], "run has no complete checkpoint"),
        (
            lambda run: [shutil.rmtree(p) for p in run.glob("checkpoint-*")],
            "run is not .*drafter.* it has no config.json",
        ),
        (lambda run: (run / "run.json").write_text("{"), r"run\.json cannot be read"),
        (
            lambda run: (run / "run.json").write_text('{"target": "x"}'),
            r"run\.json cannot be read: it lacks .*train_data",
        ),
        (lambda run: (run / "recipe.yaml").write_text("a: ["), r"recipe\.yaml cannot be read"),
        (lambda run: (run / "recipe.yaml").write_text("text"), r"recipe\.yaml cannot be read: expected a mapping"),
        (leave_fsdp_shards, "checkpoint-8 holds FSDP's shards.*FULL_STATE_DICT"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line_by_the_command(run, tmp_path, capsys, damage, named):
    damage(run)
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 1
    err = [line for line in capsys.readouterr().err.splitlines() if "it/s" not in line]
    assert len(err) == 1
    assert err[0].startswith("hyperdflash export: ")
    with pytest.raises((ValueError, OSError), match=named):
        export_drafter(run, tmp_path / "out")
    assert not [p for p in tmp_path.iterdir() if p != run]


def test_another_models_folder_is_refused_by_its_type(target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="target is not .*drafter.*model_type 'deepseek_v4'"):
        export_drafter(tmp_path / "target", tmp_path / "out")


def test_a_folder_for_vllm_is_refused_with_the_way_back(target, tmp_path):
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", tmp_path / "served", format="vllm")
    with pytest.raises(ValueError, match="served is a folder for vLLM: .*read_vllm"):
        export_drafter(tmp_path / "served", tmp_path / "out")


@pytest.mark.parametrize("package", ["matplotlib", "peft"])
def test_a_missing_package_is_named_with_pips_command_before_any_work(target, run, tmp_path, monkeypatch, package):
    if package == "peft":
        adapted = get_peft_model(
            HyperDFlashModel.from_pretrained(run / "checkpoint-8"), LoraConfig(target_modules="all-linear")
        )
        write_checkpoint(run, adapted, 12)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        export_drafter(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    trained(target, 1).save_pretrained(tmp_path / "plain")  # no log, no adapter: neither is needed
    assert set(files_of(export_drafter(tmp_path / "plain", tmp_path / "out"))) == DRAFTER


def test_the_command_exports_and_says_how_to_publish(run, tmp_path, capsys):
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert set(files_of(tmp_path / "out")) == DRAFTER | {"training.png", "command.txt"}
    assert f"hf upload <repository> {tmp_path / 'out'}" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- the card


def test_the_card_has_the_runs_facts_and_a_header_that_the_hub_reads(exported):
    header = ModelCard.load(exported / "README.md").data
    assert (header.library_name, header.license, header.base_model) == (
        "transformers",
        "apache-2.0",
        "deepseek-ai/DeepSeek-V4-Flash",
    )
    assert "speculative-decoding" in header.tags
    text = read_card(exported)
    for fact in (
        "revision `0123456789abcdef`",
        "generation `0731`, mode `thinking`, effort `high`",
        f"`chat.jsonl`, sha256 `{'a1' * 32}`",
        f"`held-out.jsonl`, sha256 `{'b2' * 32}`",
        "- 1 left out: no supervised token",
        "| `learning_rate` | `0.0001` |",
        "| `init_from` | `stage1` |",
        '| `drafter` | `{"block_size": 4}` |',
        "| `loss` | 0.5 | ",
        "| `eval_loss` | 0.5312 | ",
        "| `eval_acceptance_length` | 2.75 | real greedy decoding of 8 prompts",
        "| `eval_expected_acceptance_length` | 2.125 | ",
        "| slot | 1 | 2 | 3 |",
        "| right | 0.8 | 0.7 | 0.6 |",
        "| right, and all before it | 0.65 | 0.45 | 0.25 |",
        "At step 8 (evaluated at step 8), of the weights in fp32",
        "Step 8 of 8, 2 epochs.",
        "Median speed: 1,005 tokens/s.",
        "torch 2.13.0, transformers 5.24.0",
        "hyperdflash train stage2.yaml",
        "![loss, acceptance length and acceptance by slot over the run's steps](training.png)",
    ):
        assert fact in text, fact
    assert "missing" not in text
    assert "not known" not in text


def test_the_card_of_an_earlier_checkpoint_has_that_checkpoints_figures(run, tmp_path):
    write_state(run / "checkpoint-8", 8, best="checkpoint-4")
    write_state(run / "checkpoint-4", 4, best="checkpoint-4")
    text = read_card(export_drafter(run, tmp_path / "out"))
    assert "| `eval_acceptance_length` | 3.25 | " in text
    assert "Step 4 of 8, 1 epochs; the run's best by `eval_acceptance_length`." in text


def test_no_access_token_is_published(exported):
    assert not [name for name, content in files_of(exported).items() if b"hf_abcdef" in content]
    assert (exported / "command.txt").read_text() == "hyperdflash train stage2.yaml hub_token=<removed> seed=1\n"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("run.json", "the run's `run.json` is missing"),
        ("recipe.yaml", "the run's `recipe.yaml` is missing"),
        ("command.txt", "the run's `command.txt` is missing"),
    ],
)
def test_a_file_that_is_missing_is_said_to_be_missing(run, tmp_path, gone, said):
    (run / gone).unlink()
    out = export_drafter(run, tmp_path / "out")
    assert len(re.findall(r"is\s+missing", read_card(out))) == 1
    assert said in read_card(out)
    assert (out / "command.txt").exists() == (gone != "command.txt")


def test_a_drafter_of_no_run_says_that_nothing_is_known_and_shows_nothing(target, tmp_path):
    drafter = trained(target, 1)
    drafter.config.target_name_or_path, drafter.config.target_revision = "tiny-v4", None
    drafter.config.encoding = {"generation": "preview", "modes": ["non-thinking"]}
    drafter.save_pretrained(tmp_path / "plain")
    out = export_drafter(tmp_path / "plain", tmp_path / "out")
    text = read_card(out)
    assert "Nothing is known about how these weights were trained" in text
    assert '`{"generation": "preview", "modes": ["non-thinking"]}`' in text
    assert ModelCard.load(out / "README.md").data.base_model is None  # a local folder's name is no Hub id
    assert f"{drafter.num_parameters():,} parameters" in text
    assert "\n|" not in text  # no table
    assert set(files_of(out)) == DRAFTER


def test_a_run_can_be_named_for_a_folder_that_lies_elsewhere(target, run, tmp_path):
    trained(target, 1).save_pretrained(tmp_path / "plain")
    text = read_card(export_drafter(tmp_path / "plain", tmp_path / "out", run_dir=run))
    assert "| `learning_rate` | `0.0001` |" in text
    assert "Not known for these weights: the exported folder has no `trainer_state.json`" in text
    assert "| `eval_acceptance_length` | 2" not in text  # the run's checkpoints have figures, these weights have none
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder of a run"):
        export_drafter(tmp_path / "plain", tmp_path / "other", run_dir=tmp_path / "nowhere")


def test_an_unfinished_run_and_one_without_evaluation_are_called_so(run, tmp_path):
    write_run_files(run, finished=False, target_revision=None, eval_data=[], effort=None)
    for path in run.glob("*/trainer_state.json"):
        state = json.loads(path.read_text())
        state["log_history"] = [entry for entry in state["log_history"] if "loss" in entry]
        path.write_text(json.dumps(state))
    text = read_card(export_drafter(run, tmp_path / "out"))
    assert "The run had not finished when this was exported." in text
    assert "This run had not evaluated anything yet, or was not asked to." in text
    assert "revision not recorded" in text
    assert "Evaluation data: none" in text
    assert "effort `none`" in text


def test_a_log_with_nothing_to_draw_makes_no_picture(run, tmp_path):
    for path in run.glob("*/trainer_state.json"):
        state = json.loads(path.read_text())
        state["log_history"] = [{"step": 1, "loss": float("nan")}, {"step": 1, "train_runtime": 3.0}]
        path.write_text(json.dumps(state))
    out = export_drafter(run, tmp_path / "out")
    assert "training.png" not in files_of(out)
    assert "training.png" not in read_card(out)


def test_the_picture_goes_on_behind_the_checkpoint_but_not_with_another_runs_log(run):
    checkpoint = run / "checkpoint-4"
    assert run_folder.read_run(checkpoint, run).history == log_history(8)
    state = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())
    state["log_history"][0]["loss"] = 9.0
    (run / "checkpoint-8" / "trainer_state.json").write_text(json.dumps(state))
    assert run_folder.read_run(checkpoint, run).history == log_history(4)


@pytest.mark.pictures
def test_a_long_log_with_gaps_and_nans_makes_a_small_picture(tmp_path):
    history = [{"step": i, "loss": float("nan") if i == 7 else 1.0 + i % 5} for i in range(20_000)]
    card.draw_history(tmp_path / "training.png", history)
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "training.png").stat().st_size < 300_000
    steps, values = card._series(history, "loss")
    assert len(steps) == len(values) <= card.MAX_POINTS
    assert max(values) <= 5
