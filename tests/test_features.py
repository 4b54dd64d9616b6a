"""Features in a folder are the target's, of the right sample, and whole: or they are refused by name."""

import errno
import math
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_v4 import TINY_WORLD_TARGET, features_recipe, tiny_drafter_config, tiny_target
from torch.utils.data import DataLoader
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from hyperdflash import __main__ as cli
from hyperdflash.common.checkpoint import TargetCheckpoint, load_target
from hyperdflash.training import feature_cache, features
from hyperdflash.training.dataset import NO_SAMPLE, SampleDataset, collate
from hyperdflash.training.feature_cache import CachedFeatures, target_name
from hyperdflash.training.features import check_features, extract, make_batches, make_windows, verify
from hyperdflash.training.target import OnlineFeatures, TargetHead

LENGTHS = (5, 9, 3, 12, 7, 7, 4, 20, 6, 7, 7, 11)
WINDOW_TOKENS = 15  # the windows of LENGTHS: 5+9, 3+12, 7+7, 4, 20, 6+7, 7, 11
WINDOWS = [range(0, 2), range(2, 4), range(4, 6), range(6, 7), range(7, 8), range(8, 10), range(10, 11), range(11, 12)]
TOKEN_BYTES = 2 * 32 * 2  # paths x width x bf16


def make_rows(lengths=LENGTHS, seed=0) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(seed)
    return datasets.Dataset.from_dict(
        {
            "input_ids": [torch.randint(63, (n,), generator=generator).tolist() for n in lengths],
            "loss_mask": [[0] + [1] * (n - 1) for n in lengths],
            "length": list(lengths),
            "source": [f"train.jsonl:{i + 1}" for i in range(len(lengths))],
        }
    )


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def config(target):
    return tiny_drafter_config(target)


@pytest.fixture(scope="module")
def layers(target):
    return tiny_drafter_config(target, context_source="hidden_layers", target_layer_ids=[0, 2])


@pytest.fixture(scope="module")
def rows():
    return make_rows()


@pytest.fixture(scope="module")
def written(target, config, rows, tmp_path_factory) -> Path:
    """A complete folder; tests that change it take a copy."""
    return write(tmp_path_factory.mktemp("written") / "features", target, config, rows)


@pytest.fixture
def folder(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "features"))


def cache(folder: Path, target, config, **kwargs) -> CachedFeatures:
    return CachedFeatures(folder, TargetHead.from_target(target), config, **kwargs)


def write(folder: Path, target, config, rows, *, batch_tokens=40) -> Path:
    window = WINDOW_TOKENS * TOKEN_BYTES
    extract(
        OnlineFeatures(target, config),
        rows,
        cache(folder, target, config),
        batch_tokens=batch_tokens,
        window_bytes=window,
    )
    return folder


def random_sample(index: int, length: int) -> torch.Tensor:
    return torch.randn(length, 2, 32, generator=torch.Generator().manual_seed(index))


def write_random(folder: Path, target, config, rows) -> Path:
    """Features that come from elsewhere, to test the writing alone."""
    features = cache(folder, target, config)
    for index in features.missing(rows):
        features.write(rows[index]["input_ids"], random_sample(index, rows[index]["length"]))
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def whole(content: dict[str, bytes]) -> dict[str, bytes]:
    """Without what a kill leaves behind."""
    return {name: data for name, data in content.items() if not name.endswith(".partial")}


def fork(function) -> int:
    """Run `function` in a child; returns its pid. Status 0 when it returned, 1 after an exception."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def batch_of(rows, indices) -> dict:
    return collate([SampleDataset(rows)[i] for i in indices])


# -------------------------------------------------------------------------------------------------- the right features


@pytest.mark.parametrize("source", ["pre_hc_head", "hidden_layers"])
def test_online_and_stored_features_are_the_same_bit_for_bit(target, config, layers, rows, tmp_path, source):
    config = config if source == "pre_hc_head" else layers
    online = OnlineFeatures(target, config)
    stored = cache(write(tmp_path / "features", target, config, rows, batch_tokens=1), target, config)  # one a forward
    loader = DataLoader(SampleDataset(rows, stored), batch_size=5, shuffle=True, collate_fn=collate)
    seen = []
    for batch in loader:
        got = stored(batch)
        seen += batch["sample_ids"].tolist()
        for row, index in enumerate(batch["sample_ids"].tolist()):
            want = online(batch_of(rows, [index]))
            for ours, theirs in zip(got, want, strict=True):
                length = LENGTHS[index]
                assert ours.dtype == theirs.dtype == torch.float32
                assert torch.equal(ours[row, :length], theirs[0].bfloat16().float())
                assert not ours[row, length:].any()
    assert sorted(seen) == list(range(len(rows)))


def test_a_file_is_one_sample_and_holds_its_residual_once(written, target, config, layers, rows, tmp_path):
    stored = cache(written, target, config)
    assert len(list(stored.folder.iterdir())) == len(rows)
    tensors = load_file(stored.path(rows[1]["input_ids"]))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {"context": (9, 2, 32), "input_ids": (9,)}
    got = stored(collate([SampleDataset(rows, stored)[0]]))
    assert got.residual is got.context_hidden_states
    stored = cache(write(tmp_path / "layers", target, layers, rows), target, layers)
    tensors = load_file(stored.path(rows[1]["input_ids"]))
    assert tensors["context"].shape == (9, 1, 64)
    assert tensors["residual"].shape == (9, 2, 32)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1)], ids=["as written", "shuffled"])
def test_each_sample_of_a_batch_has_the_features_of_its_own_ids(target, config, tmp_path, order):
    """https://github.com/vllm-project/speculators/issues/279"""
    rows = make_rows((5, 9, 3, 12)).select(order)
    lengths = list(rows["length"])
    online = OnlineFeatures(target, config)
    alone = [online(batch_of(rows, [i])).residual[0] for i in range(4)]
    assert list(make_batches(range(4), lengths, 48)) == [sorted(range(4), key=lambda i: lengths[i])]
    for name in ("first", "second"):  # nothing is carried from one extraction to the next
        stored = cache(tmp_path / name, target, config)
        extract(online, rows, stored, batch_tokens=48)
        for i, sample in enumerate(stored.load(rows["input_ids"])):
            assert len(sample["context"]) == lengths[i]
            torch.testing.assert_close(sample["context"].float(), alone[i], atol=1e-5, rtol=1 / 128)
            others = [j for j in range(4) if j != i and lengths[j] >= lengths[i]]
            assert all((alone[j][: lengths[i]] - alone[i]).abs().max() > 0.1 for j in others)
    assert tree(tmp_path / "first") == tree(tmp_path / "second")


def test_a_batch_holds_samples_of_similar_length_within_its_tokens():
    got = list(make_batches(range(6), [3, 10, 4, 9, 50, 3], batch_tokens=20))
    assert got == [[0, 5, 2], [3, 1], [4]]  # 3 x 4 tokens, 2 x 10, and one too long for any batch


def test_a_window_holds_consecutive_samples_and_at_least_one():
    assert make_windows(LENGTHS, WINDOW_TOKENS) == WINDOWS
    assert make_windows([100], 15) == [range(1)]


def test_workers_read_the_right_samples(written, target, config, rows):
    stored = cache(written, target, config)
    order = [7, 0, 11, 3, 10, 1, 8, 4, 2, 9, 6, 5]
    loader = DataLoader(SampleDataset(rows, stored), batch_size=3, sampler=order, collate_fn=collate, num_workers=2)
    batches = list(loader)
    assert torch.cat([batch["sample_ids"] for batch in batches]).tolist() == order
    for batch in batches:
        for row, index in enumerate(batch["sample_ids"].tolist()):
            ids = rows[index]["input_ids"]
            assert batch["input_ids"][row, : LENGTHS[index]].tolist() == ids
            assert torch.equal(batch["context"][row, : LENGTHS[index]], stored.load([ids])[0]["context"])


def test_a_filler_has_the_shapes_of_a_sample_and_needs_none(written, target, config, layers, rows, tmp_path):
    write(tmp_path / "layers", target, layers, rows)
    for folder, of in ((written, config), (tmp_path / "layers", layers)):
        data = SampleDataset(rows, cache(folder, target, of))
        filler, sample = data.__getitems__([NO_SAMPLE, 3])
        assert {name: x.dtype for name, x in filler.items() if name != "sample_id"} == {
            name: x.dtype for name, x in sample.items() if name != "sample_id"
        }
        assert collate([sample, filler])["lengths"].tolist() == [12, 0]


def test_a_pickled_reader_carries_no_head(written, target, config, rows):
    stored = cache(written, target, config)
    assert len(pickle.dumps(stored)) < 4000
    copy, ids = pickle.loads(pickle.dumps(stored)), rows[7]["input_ids"]
    assert torch.equal(copy.load([ids])[0]["context"], stored.load([ids])[0]["context"])


def test_a_batch_without_stored_features_is_refused(written, target, config, rows):
    with pytest.raises(ValueError, match="pass features= to its SampleDataset"):
        cache(written, target, config)(batch_of(rows, [0]))


# ------------------------------------------------------------------------------------------------- names, not settings


def test_the_same_samples_in_another_order_part_or_set_are_there(written, target, config, rows):
    stored = cache(written, target, config)
    assert not stored.missing(rows.select([7, 2, 9]))
    more = datasets.concatenate_datasets([rows, make_rows((8, 8), seed=1), rows, make_rows((8,), seed=1)])
    assert stored.missing(more) == [12, 13]  # equal samples are one
    with pytest.raises(
        ValueError, match=r"lacks the features of 2 of 27 samples of train data, the first .*jsonl:1: "
    ):
        check_features(stored, {"train": more})


def test_a_target_is_known_by_its_content_wherever_it_lies(target, config, layers, tmp_path, monkeypatch):
    names = {target_name(TargetHead.from_target(target), config)}
    for place in ("here", "there"):
        target.save_pretrained(tmp_path / place)
        names.add(target_name(TargetHead.from_checkpoint(TargetCheckpoint(tmp_path / place)), config))
    assert len(names) == 1
    others = {
        target_name(TargetHead.from_target(tiny_target(seed=5)), config),
        target_name(TargetHead.from_target(target), layers),
        target_name(TargetHead.from_checkpoint(TargetCheckpoint(tmp_path / "here"), "bfloat16"), config),
    }
    assert len(others | names) == 4


def test_the_features_of_another_target_are_not_taken(written, config, rows):
    stored = cache(written, tiny_target(seed=5), config)  # the same name, other weights: retrained in place, say
    assert len(stored.missing(rows)) == len(rows)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_head_of_a_checkpoint_is_that_of_the_loaded_target(dtype, monkeypatch):
    head = TargetHead.from_target(load_target(str(TINY_WORLD_TARGET), None, dtype)[0])

    def refuse(self, *args, **kwargs):
        raise AssertionError("a target was made")

    for name in ("DeepseekV4ForCausalLM", "DeepseekV4Model", "DeepseekV4DecoderLayer"):
        monkeypatch.setattr(getattr(modeling_deepseek_v4, name), "__init__", refuse)
    read = TargetHead.from_checkpoint(TargetCheckpoint(TINY_WORLD_TARGET), dtype)
    assert read.sha256 == head.sha256
    ids, residual = torch.arange(6).view(2, 3), torch.randn(2, 3, 4, 192)
    assert torch.equal(read.embed(ids), head.embed(ids))
    for kind in ("mean_pool", "hc_head"):
        assert torch.equal(read.teacher_hidden(residual, kind), head.teacher_hidden(residual, kind))


# ------------------------------------------------------------------------------------------------- killed and resumed


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_killed_at_any_moment_ends_with_the_same_bytes(written, target, config, rows, tmp_path):
    """https://github.com/vllm-project/speculators/pull/912"""
    start = time.perf_counter()
    os.waitpid(fork(lambda: write(tmp_path / "timed", target, config, rows)), 0)
    seconds = time.perf_counter() - start
    assert tree(tmp_path / "timed") == tree(written)
    moments, statuses, caught = random.Random(0), [], []
    for i in range(10):
        folder = tmp_path / str(i)
        pid = fork(lambda folder=folder: write(folder, target, config, rows))
        time.sleep(moments.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        statuses.append(os.waitpid(pid, 0)[1])
        caught.append(len(list(folder.glob("*/*.safetensors"))))
        assert whole(tree(folder)).items() <= tree(written).items()
        assert whole(tree(write(folder, target, config, rows))) == tree(written)
    assert sum(map(os.WIFSIGNALED, statuses)) >= 5
    assert any(0 < count < len(rows) for count in caught)


def test_a_run_killed_at_any_write_ends_with_the_same_bytes(target, config, tmp_path, monkeypatch):
    """https://github.com/vllm-project/speculators/pull/912: before and after every sync, rename and folder."""
    steps = []
    kill_at = -1

    def step(when):
        steps.append(when)
        if len(steps) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function):
        def call(*args, **kwargs):
            step("before")
            result = function(*args, **kwargs)
            step("after")
            return result

        return call

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))
    monkeypatch.setattr(Path, "mkdir", counted(Path.mkdir))
    rows = make_rows(LENGTHS[:3])
    want = tree(write_random(tmp_path / "whole", target, config, rows))
    num_steps = len(steps)
    assert num_steps >= 2 * (1 + 2 * 3)  # the folder, and of each file a sync and a rename
    for i in range(1, num_steps + 1):
        folder = tmp_path / str(i)
        kill_at, steps[:] = i, []
        _, status = os.waitpid(fork(lambda folder=folder: write_random(folder, target, config, rows)), 0)
        assert os.WIFSIGNALED(status)
        kill_at = -1
        assert whole(tree(folder)).items() <= want.items()
        assert whole(tree(write_random(folder, target, config, rows))) == want


def test_a_resumed_run_does_only_what_is_missing(folder, target, config, rows, monkeypatch):
    before, stored = tree(folder), cache(folder, target, config)
    for index in (2, 7):
        stored.path(rows[index]["input_ids"]).unlink()
    assert stored.missing(rows) == [2, 7]
    times = {path: path.stat().st_mtime_ns for path in stored.folder.iterdir()}
    asked, run = [], OnlineFeatures.__call__
    monkeypatch.setattr(OnlineFeatures, "__call__", lambda s, b: asked.append(b["input_ids"].shape) or run(s, b))
    assert tree(write(folder, target, config, rows)) == before
    # The forwards of the uninterrupted run: the neighbour of sample 2 runs with it
    assert [tuple(shape) for shape in asked] == [(2, 12), (1, 20)]
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


def test_many_writers_of_the_same_files_end_with_whole_ones(target, config, tmp_path):
    rows = make_rows((200,) * 20)
    want = tree(write_random(tmp_path / "alone", target, config, rows))
    folder = tmp_path / "together"
    pids = [fork(lambda: write_random(folder, target, config, rows)) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert tree(folder) == want


def test_what_killed_processes_left_is_swept_away_and_what_is_being_written_is_not(folder, target, config):
    stored = cache(folder, target, config)
    old, new = (stored.folder / f".{name}.safetensors.1234.partial" for name in ("old", "new"))
    for partial in (old, new):
        partial.write_bytes(b"x")
    os.utime(old, (0, 0))
    stored.sweep()
    assert (old.exists(), new.exists()) == (False, True)


def test_wrong_samples_are_refused_by_the_writer(target, config, layers, tmp_path):
    stored = cache(tmp_path / "features", target, config)
    with pytest.raises(ValueError, match=r"context must be of shape \(9, 2, 32\); got \(8, 2, 32\)"):
        stored.write([1] * 9, torch.zeros(8, 2, 32))
    with pytest.raises(ValueError, match=r"residual must be of shape \(5, 2, 32\); got None"):
        cache(tmp_path / "layers", target, layers).write([1] * 5, torch.zeros(5, 1, 64))
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("problem", ["cut short", "header", "other sample", "other width", "fp32"])
def test_a_file_that_is_not_the_samples_is_refused_by_name(folder, target, config, rows, problem):
    stored, ids = cache(folder, target, config), rows[4]["input_ids"]
    path = stored.path(ids)
    tensors, content = load_file(path), bytearray(path.read_bytes())
    if problem == "cut short":
        path.write_bytes(content[:-5])
    elif problem == "header":
        content[20] ^= 1
        path.write_bytes(content)
    elif problem == "other sample":
        shutil.copy(stored.path(rows[5]["input_ids"]), path)  # of the same length
    elif problem == "other width":
        save_file({**tensors, "context": torch.zeros(7, 2, 31).bfloat16()}, path)
    else:
        save_file({**tensors, "context": tensors["context"].float()}, path)
    with pytest.raises(ValueError, match=rf"{path.name} is damaged \(.*\): remove it, and it is written again"):
        stored.load([ids])
    with pytest.raises(ValueError, match=f"1 of 12 samples have no good features: .*{path.name}"):
        verify(stored, rows)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path.name} is missing: `hyperdflash features RECIPE` writes"):
        stored.load([ids])
    write(folder, target, config, rows)
    verify(stored, rows)


def test_a_flipped_bit_is_found(folder, target, config, rows):
    stored = cache(folder, target, config)
    path = stored.path(rows[6]["input_ids"])
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name} is damaged .*its content is not what its checksum says"):
        verify(stored, rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found_at_load(folder, target, config, rows, value):
    stored = cache(folder, target, config)
    path = stored.path(rows[1]["input_ids"])
    tensors = load_file(path)
    tensors["context"][3, 1, 7] = value
    save_file(tensors, path)
    loader = DataLoader(SampleDataset(rows, stored), batch_size=2, num_workers=1, collate_fn=collate)
    with pytest.raises(ValueError, match=f"{path.name} is damaged .context is not finite"):
        next(iter(loader))


def test_features_that_are_not_finite_are_never_stored(target, config, rows, tmp_path):
    online = OnlineFeatures(target, config)

    def broken(batch):
        output = online(batch)
        output.residual[(batch["input_ids"] == rows[2]["input_ids"][1])] = math.nan
        return output

    with pytest.raises(ValueError, match=r"train.jsonl:\d+: the target's context holds NaN"):
        extract(broken, rows, cache(tmp_path / "features", target, config), batch_tokens=1)
    assert not any("partial" in name for name in tree(tmp_path))


# ------------------------------------------------------------------------------------------- disks, paths, the command


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_disk_that_fills_up_leaves_no_half_written_file(target, config, tmp_path, monkeypatch, fails_at):
    calls, sync, rows = [], os.fsync, make_rows(LENGTHS[:4])

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"\w+.safetensors was not written: No space left") as found:
            write_random(tmp_path / "features", target, config, rows)
    assert found.value.errno == errno.ENOSPC
    assert not any("partial" in name for name in tree(tmp_path))
    want = tree(write_random(tmp_path / "whole", target, config, rows))
    assert tree(write_random(tmp_path / "features", target, config, rows)) == want


def test_a_write_that_breaks_in_the_middle_leaves_no_half_written_file(target, config, tmp_path):
    rows = make_rows((100, 100, 1000))  # 12.8 kB, and a file of 128 kB

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, 64_000))
        with pytest.raises(OSError, match="safetensors was not written: File too large"):
            write_random(tmp_path / "features", target, config, rows)

    assert os.waitpid(fork(limited), 0)[1] == 0
    assert all(name.endswith(".safetensors") for name in tree(tmp_path / "features"))
    assert cache(tmp_path / "features", target, config).missing(rows) == [2]


def test_a_read_only_folder_is_refused_before_any_work():
    """https://github.com/vllm-project/speculators/pull/743"""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o555)

    def as_nobody():
        if os.geteuid() == 0:  # root may write anywhere
            os.setuid(65534)
        with pytest.raises(PermissionError, match=f"{parent} is not writable"):
            feature_cache.check_space(parent / "features", 0)

    status = os.waitpid(fork(as_nobody), 0)[1]
    parent.rmdir()
    assert status == 0


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return features_recipe(tmp_path)


def test_the_command_writes_once_verifies_and_says_what_is_wrong(recipe, capsys, monkeypatch):
    folder = recipe.parent / "features"
    assert cli.main(["features", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 samples of train data to write" in out
    assert "1 of 1 samples of eval data to write" in out
    assert "22 tokens of 1.5 KiB: 33.0 KiB" in out  # 7 + 10 + 5 tokens of 4 x 192 in bf16
    assert f"{next(folder.iterdir())} is complete" in out
    assert not (recipe.parent / "run").exists()

    def refuse(*args):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(features, "load_target_model", refuse)
    before = tree(folder)
    assert len(before) == 3
    assert cli.main(["features", str(recipe)]) == 0
    assert cli.main(["features", str(recipe), "--verify"]) == 0
    assert "the features of 1 samples of eval data are as they were written" in capsys.readouterr().out
    assert tree(folder) == before
    file = next(folder.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert cli.main(["features", str(recipe), "--verify"]) == 1
    assert file.name in capsys.readouterr().err


@pytest.mark.parametrize("problem", ["full", "full with both", "absent", "a file", "nowhere", "unknown"])
def test_the_command_fails_in_one_line_without_loading_the_target(recipe, capsys, monkeypatch, problem):
    """https://github.com/vllm-project/speculators/pull/743"""

    def refuse(*args):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(features, "load_target_model", refuse)
    override, status, message = {
        "full": ("use_cpu=true", 1, "the features do not fit in features_dir"),
        "full with both": ("use_cpu=true", 1, "33.0 KiB to write, 30.0 KiB free"),
        "absent": (f"features_dir={recipe.parent}/absent/features", 1, "absent is not a folder"),
        "a file": (f"features_dir={recipe}", 1, "recipe.yaml is not a folder"),
        "nowhere": ("features_dir=null", 2, "features_dir, the folder for the features, is missing"),
        "unknown": ("feature_dir=x", 2, "unknown key 'feature_dir'"),
    }[problem]
    free = {"full": 1000, "full with both": 20 * 1536}.get(problem, 10**9)  # the train split alone would fit
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert cli.main(["features", str(recipe), override]) == status
    error = capsys.readouterr().err
    assert error.startswith("hyperdflash features: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (recipe.parent / "features").exists()


def test_a_changed_setting_asks_only_for_the_samples_that_it_changes(recipe, capsys):
    assert cli.main(["features", str(recipe)]) == 0
    capsys.readouterr()
    assert cli.main(["features", str(recipe), "max_length=8"]) == 0  # of 7, 10 and 5 tokens
    out = capsys.readouterr().out
    assert "1 of 2 samples of train data to write" in out
    assert "0 of 1 samples of eval data to write" in out


def test_a_head_that_is_loaded_in_fp32_is_the_same_target(tmp_path):
    """A run that began on a CPU without bf16 goes on elsewhere."""
    tiny_target().to(torch.bfloat16).save_pretrained(tmp_path)
    own, fp32 = (TargetHead.from_checkpoint(TargetCheckpoint(tmp_path), dtype) for dtype in ("auto", "float32"))
    assert own.lm_head.dtype != fp32.lm_head.dtype
    assert own.sha256 == fp32.sha256
