"""Stored features are the target's, of the right sample, and whole: or they are refused by name."""

import errno
import json
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
from tiny_v4 import features_recipe, tiny_drafter_config, tiny_target
from torch.utils.data import DataLoader
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from hyperdflash import __main__ as cli
from hyperdflash.training import feature_store, features
from hyperdflash.training.dataset import SampleDataset, collate
from hyperdflash.training.feature_store import FeatureWriter, OfflineFeatures, plan_shards
from hyperdflash.training.features import extract, make_batches, verify
from hyperdflash.training.target import OnlineFeatures, TargetHead

LENGTHS = (5, 9, 3, 12, 7, 7, 4, 20, 6, 7, 7, 11)
SHARD_TOKENS = 15  # the shards of LENGTHS: 5+9, 3+12, 7+7, 4, 20, 6+7, 7, 11
SHARDS = [range(0, 2), range(2, 4), range(4, 6), range(6, 7), range(7, 8), range(8, 10), range(10, 11), range(11, 12)]
SHARD_BYTES = SHARD_TOKENS * 2 * 32 * 2  # tokens x paths x width x bf16
SETTINGS = {
    "target": "org/model",
    "target_revision": "c0ffee",
    "target_dtype": "auto",
    "tokenizer": "7a7a",
    "mode": "non-thinking",
    "effort": None,
    "generation": "preview",
    "max_length": 512,
    "dtype": "bfloat16",
    "context_source": "pre_hc_head",
    "target_layer_ids": [2],
    "data": "0123",
    "data_files": ["train.jsonl"],
}


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
def rows():
    return make_rows()


@pytest.fixture(scope="module")
def written(target, config, rows, tmp_path_factory) -> Path:
    """A complete folder; tests that change it take a copy."""
    return write(tmp_path_factory.mktemp("written") / "features", target, config, rows)


@pytest.fixture
def folder(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "features"))


def write(folder: Path, target, config, rows, *, batch_tokens=40, shard_bytes=SHARD_BYTES, **settings) -> Path:
    online = OnlineFeatures(target, config)
    lengths = rows["length"]
    writer = FeatureWriter(folder, {**SETTINGS, **settings}, config, lengths=lengths, shard_bytes=shard_bytes)
    writer.start(online.head)
    extract(online, rows, writer, batch_tokens=batch_tokens)
    return folder


def random_sample(index: int, length: int) -> torch.Tensor:
    return torch.randn(length, 2, 32, generator=torch.Generator().manual_seed(index))


def write_random(folder: Path, target, config, lengths=LENGTHS, **settings) -> Path:
    """Features that come from elsewhere, to test the writer alone."""
    writer = FeatureWriter(folder, {**SETTINGS, **settings}, config, lengths=lengths, shard_bytes=SHARD_BYTES)
    writer.start(TargetHead.from_target(target))
    for samples in writer.missing:
        for index in samples:
            writer.add(index, random_sample(index, lengths[index]))
    return folder


def shard(folder: Path, index: int) -> Path:
    return folder / "train" / f"shard-{index:05d}.safetensors"


def edit_manifest(folder: Path, change) -> None:
    path = folder / "train" / "manifest.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
def test_online_and_offline_features_are_the_same_bit_for_bit(target, rows, tmp_path, source):
    config = tiny_drafter_config(
        target, context_source=source, target_layer_ids=[0, 2] if source != "pre_hc_head" else None
    )
    online = OnlineFeatures(target, config)
    write(tmp_path / "features", target, config, rows, batch_tokens=1, context_source=source)  # a sample a forward
    offline = OfflineFeatures(tmp_path / "features", {**SETTINGS, "context_source": source})
    loader = DataLoader(SampleDataset(rows, offline), batch_size=5, shuffle=True, collate_fn=collate)
    seen = []
    for batch in loader:
        got = offline(batch)
        seen += batch["sample_ids"].tolist()
        for row, index in enumerate(batch["sample_ids"].tolist()):
            want = online(batch_of(rows, [index]))
            for ours, theirs in zip(got, want, strict=True):
                length = LENGTHS[index]
                assert ours.dtype == theirs.dtype == torch.float32
                assert torch.equal(ours[row, :length], theirs[0].bfloat16().float())
                assert not ours[row, length:].any()
    assert sorted(seen) == list(range(len(rows)))


def test_the_context_of_the_residual_itself_is_stored_once(written, target, rows, tmp_path):
    stored = load_file(shard(written, 0))
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {"context": (14, 2, 32), "offsets": (3,)}
    assert stored["offsets"].tolist() == [0, 5, 14]
    offline = OfflineFeatures(written, SETTINGS)
    got = offline(collate([SampleDataset(rows, offline)[0]]))
    assert got.residual is got.context_hidden_states

    config = tiny_drafter_config(target, context_source="hidden_layers", target_layer_ids=[0, 2])
    stored = load_file(shard(write(tmp_path / "layers", target, config, rows, shard_bytes=10**6), 0))
    assert stored["context"].shape == (sum(LENGTHS), 1, 64)
    assert stored["residual"].shape == (sum(LENGTHS), 2, 32)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1)], ids=["as written", "shuffled"])
def test_each_sample_of_a_batch_has_the_features_of_its_own_ids(target, config, tmp_path, order):
    """https://github.com/vllm-project/speculators/issues/279"""
    rows = make_rows((5, 9, 3, 12)).select(order)
    lengths = rows["length"]
    online = OnlineFeatures(target, config)
    alone = [online(batch_of(rows, [i])).residual[0] for i in range(4)]
    for name in ("first", "second"):  # nothing is carried from one extraction to the next
        folder = tmp_path / name
        writer = FeatureWriter(folder, {**SETTINGS, "dtype": "float32"}, config, lengths=lengths)
        assert list(make_batches(range(4), lengths, 48)) == [sorted(range(4), key=lambda i: lengths[i])]
        writer.start(online.head)
        extract(online, rows, writer, batch_tokens=48)
        offline = OfflineFeatures(folder, {**SETTINGS, "dtype": "float32"})
        for i in range(4):
            assert len(offline[i]["context"]) == lengths[i]
            torch.testing.assert_close(offline[i]["context"], alone[i], atol=1e-5, rtol=0)
            others = [j for j in range(4) if j != i and lengths[j] >= lengths[i]]
            assert all((alone[j][: lengths[i]] - alone[i]).abs().max() > 0.1 for j in others)
    assert tree(tmp_path / "first") == tree(tmp_path / "second")


def test_a_batch_holds_samples_of_similar_length_within_its_tokens():
    got = list(make_batches(range(6), [3, 10, 4, 9, 50, 3], batch_tokens=20))
    assert got == [[0, 5, 2], [3, 1], [4]]  # 3 x 4 tokens, 2 x 10, and one too long for any batch


def test_a_shard_holds_consecutive_samples_and_at_least_one():
    assert plan_shards(LENGTHS, SHARD_TOKENS) == SHARDS
    assert plan_shards([100], 15) == [range(1)]


def test_workers_read_the_right_samples(written, rows):
    offline = OfflineFeatures(written, SETTINGS)
    _ = offline[0]  # whatever the parent holds open is not shared
    dataset = SampleDataset(rows, offline)
    order = [7, 0, 11, 3, 10, 1, 8, 4, 2, 9, 6, 5]
    batches = list(DataLoader(dataset, batch_size=3, sampler=order, collate_fn=collate, num_workers=2))
    assert torch.cat([batch["sample_ids"] for batch in batches]).tolist() == order
    for batch in batches:
        for row, index in enumerate(batch["sample_ids"].tolist()):
            assert batch["input_ids"][row, : LENGTHS[index]].tolist() == rows[index]["input_ids"]
            assert torch.equal(batch["context"][row, : LENGTHS[index]], offline[index]["context"])


def test_a_sample_is_no_view_of_its_whole_shard(written):
    """What a worker sends to its parent is the tensor's storage, all of it."""
    sample = OfflineFeatures(written, SETTINGS)[1]["context"]
    assert sample.untyped_storage().nbytes() == 9 * 2 * 32 * 2


def test_a_pickled_reader_carries_no_head(written):
    offline = OfflineFeatures(written, SETTINGS)
    size = len(pickle.dumps(offline))
    assert offline.head.lm_head.shape == (64, 32)
    copy = pickle.loads(pickle.dumps(offline))
    assert len(pickle.dumps(offline)) == size
    assert torch.equal(copy[7]["context"], offline[7]["context"])
    assert torch.equal(copy.head.lm_head, offline.head.lm_head)


def test_there_is_no_sample_behind_the_last(written):
    offline = OfflineFeatures(written, SETTINGS)
    assert len(offline) == len(list(offline)) == 12
    for index in (-1, 12):
        with pytest.raises(IndexError, match=f"sample {index} of 12"):
            offline[index]


def test_a_batch_without_stored_features_is_refused(written, rows):
    with pytest.raises(ValueError, match="pass features= to its SampleDataset"):
        OfflineFeatures(written, SETTINGS)(batch_of(rows, [0]))


# ------------------------------------------------------------------------------------------------------------ the head


def test_the_head_comes_back_with_its_hash_and_no_target_is_made(written, target, rows, monkeypatch):
    want = TargetHead.from_target(target)
    ids, residual = torch.arange(6).view(2, 3), torch.randn(2, 3, 2, 32)
    embedded, teacher = want.embed(ids), {k: want.teacher_hidden(residual, k) for k in ("mean_pool", "hc_head")}

    def refuse(self, *args, **kwargs):
        raise AssertionError("a target was made")

    for name in ("DeepseekV4ForCausalLM", "DeepseekV4Model", "DeepseekV4DecoderLayer"):
        monkeypatch.setattr(getattr(modeling_deepseek_v4, name), "__init__", refuse)
    offline = OfflineFeatures(written, SETTINGS)
    assert json.loads((written / "head.json").read_text())["sha256"] == offline.head.sha256 == want.sha256
    assert torch.equal(offline.head.embed(ids), embedded)
    for kind, states in teacher.items():
        assert torch.equal(offline.head.teacher_hidden(residual, kind), states)
    batch = collate([SampleDataset(rows, offline)[i] for i in (3, 4)])
    assert offline(batch).residual.shape == (2, 12, 2, 32)


def test_the_head_of_another_target_is_refused(folder, target, config, rows):
    other = tiny_target(seed=5)  # the same name, other weights: retrained in place, say
    writer = FeatureWriter(folder, SETTINGS, config, lengths=LENGTHS)
    before = tree(folder)
    with pytest.raises(ValueError, match="head: .* differ"):
        writer.start(TargetHead.from_target(other))
    assert tree(folder) == before
    TargetHead.from_target(other).save(folder)
    with pytest.raises(ValueError, match="lacks the target's head that .*train was written with"):
        OfflineFeatures(folder, SETTINGS)


def test_a_damaged_head_is_refused(folder):
    content = bytearray((folder / "head.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "head.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="head.safetensors does not have the hash"):
        verify(OfflineFeatures(folder, SETTINGS))
    (folder / "head.safetensors").write_bytes(content[:100])
    with pytest.raises(ValueError, match=r"head\.safetensors or head\.json cannot be read"):
        _ = OfflineFeatures(folder, SETTINGS).head


def test_a_missing_head_is_written_again(folder, target, config, rows):
    before = tree(folder)
    (folder / "head.safetensors").unlink()
    assert not FeatureWriter(folder, SETTINGS, config, lengths=LENGTHS).is_complete
    assert tree(write(folder, target, config, rows)) == before


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
        caught.append(len(list(folder.glob("train/shard-*"))))
        if (folder / "train" / "manifest.json").exists() and os.WIFSIGNALED(statuses[-1]):
            with pytest.raises(ValueError, match="is not complete|lacks the target's head"):
                OfflineFeatures(folder, SETTINGS)
        assert tree(write(folder, target, config, rows)) == tree(written)
    assert sum(map(os.WIFSIGNALED, statuses)) >= 5
    assert any(0 < count < len(SHARDS) for count in caught)


@pytest.mark.slow
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
    lengths = LENGTHS[:4]
    want = tree(write_random(tmp_path / "whole", target, config, lengths))
    assert {"train/shard-00000.safetensors", "train/shard-00001.safetensors"} < want.keys()
    num_steps = len(steps)
    assert num_steps >= 2 * (2 + 3 * 2 + 2 * 2 + 2)  # folders, manifests, shards, head
    for i in range(1, num_steps + 1):
        folder = tmp_path / str(i)
        kill_at, steps[:] = i, []
        _, status = os.waitpid(fork(lambda folder=folder: write_random(folder, target, config, lengths)), 0)
        assert os.WIFSIGNALED(status)
        kill_at = -1
        assert tree(write_random(folder, target, config, lengths)) == want


def test_a_resumed_run_does_only_what_is_missing(folder, target, config, rows, caplog):
    before = tree(folder)
    shard(folder, 1).unlink()
    shard(folder, 4).write_bytes(before["train/shard-00004.safetensors"][:-1])  # truncated
    writer = FeatureWriter(folder, SETTINGS, config, lengths=LENGTHS)
    assert writer.missing == [SHARDS[1], SHARDS[4]]
    assert not writer.is_complete
    kept = shard(folder, 0).stat().st_mtime_ns
    assert tree(write(folder, target, config, rows)) == before
    assert shard(folder, 0).stat().st_mtime_ns == kept
    assert FeatureWriter(folder, SETTINGS, config, lengths=LENGTHS).is_complete


def test_samples_come_in_any_order(written, target, config, tmp_path):
    want = tree(write_random(tmp_path / "in order", target, config))
    writer = FeatureWriter(tmp_path / "any", SETTINGS, config, lengths=LENGTHS, shard_bytes=SHARD_BYTES)
    writer.start(TargetHead.from_target(target))
    order = list(range(len(LENGTHS)))
    random.Random(1).shuffle(order)
    for index in order:
        writer.add(index, random_sample(index, LENGTHS[index]).bfloat16())
    assert tree(tmp_path / "any") == want


def test_wrong_samples_are_refused_by_the_writer(target, config, tmp_path):
    writer = FeatureWriter(tmp_path / "features", SETTINGS, config, lengths=LENGTHS)
    writer.start(TargetHead.from_target(target))
    with pytest.raises(ValueError, match=r"sample 1: context must be of shape \(9, 2, 32\); got \(8, 2, 32\)"):
        writer.add(1, torch.zeros(8, 2, 32))
    writer.add(1, torch.zeros(9, 2, 32))
    with pytest.raises(ValueError, match="sample 1 was added before"):
        writer.add(1, torch.zeros(9, 2, 32))
    layers = tiny_drafter_config(target, context_source="hidden_layers", target_layer_ids=[0, 2])
    writer = FeatureWriter(tmp_path / "layers", SETTINGS, layers, lengths=LENGTHS)
    writer.start(TargetHead.from_target(target))
    with pytest.raises(ValueError, match=r"sample 0: residual must be of shape \(5, 2, 32\); got None"):
        writer.add(0, torch.zeros(5, 1, 64))
    with pytest.raises(ValueError, match="dtype of features is one of bfloat16, float32; got 'float16'"):
        FeatureWriter(tmp_path / "half", {**SETTINGS, "dtype": "float16"}, config, lengths=LENGTHS)


# ------------------------------------------------------------------------------------------------------ other settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", "org/other"),
        ("target_revision", "decaf"),
        ("target_dtype", "float32"),
        ("tokenizer", "8b8b"),
        ("mode", "thinking"),
        ("effort", "max"),
        ("generation", "0731"),
        ("max_length", 1024),
        ("dtype", "float32"),
        ("context_source", "hidden_layers"),
        ("target_layer_ids", [1]),
        ("data", "4567"),
        ("a_later_setting", 1),
    ],
)
def test_features_of_other_settings_are_refused_with_the_field(written, config, name, value):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2478"""
    before = tree(written)
    settings = {**SETTINGS, name: value}
    message = f"other settings: {name} is .* there and .* here.*another features_dir"
    with pytest.raises(ValueError, match=message) as found:
        OfflineFeatures(written, settings)
    assert repr(value) in str(found.value)
    assert repr(SETTINGS.get(name)) in str(found.value)
    with pytest.raises(ValueError, match=message):
        FeatureWriter(written, settings, config, lengths=LENGTHS)
    assert tree(written) == before


def test_every_field_that_differs_is_named(written):
    settings = {**SETTINGS, "data": "4567", "max_length": 1024, "data_files": ["other.jsonl"]}
    with pytest.raises(ValueError, match="max_length is 512 there.*data is '0123' there.*train.jsonl.*other.jsonl"):
        OfflineFeatures(written, settings)


def test_the_same_rows_under_another_path_are_the_same_data(written):
    assert len(OfflineFeatures(written, {**SETTINGS, "data_files": ["moved/train.jsonl"]})) == 12


def test_other_lengths_or_sizes_under_the_same_settings_are_refused(written, target, config):
    with pytest.raises(ValueError, match="num_samples is 12 there and 11 here"):
        FeatureWriter(written, SETTINGS, config, lengths=LENGTHS[:-1])
    layers = tiny_drafter_config(target, context_source="hidden_layers", target_layer_ids=[0, 2])
    with pytest.raises(ValueError, match=r"token_shapes is \{'context': \[2, 32\]\} there"):
        FeatureWriter(written, SETTINGS, layers, lengths=LENGTHS)


# ----------------------------------------------------------------------------------------------------- damaged folders


def test_missing_and_truncated_shards_are_refused_by_name(folder):
    """https://github.com/vllm-project/speculators/pull/912"""
    shard(folder, 1).unlink()
    content = shard(folder, 4).read_bytes()
    shard(folder, 4).write_bytes(content[:-5])
    message = rf"shard-00001.safetensors \(missing\), shard-00004.safetensors \(truncated: {len(content) - 5:,} bytes"
    with pytest.raises(ValueError, match=message):
        OfflineFeatures(folder, SETTINGS)


def test_a_shard_from_elsewhere_is_refused_by_name(folder, target, config, rows, tmp_path):
    other = write(tmp_path / "other", target, config, rows, mode="thinking")
    for source in (shard(folder, 2), shard(other, 0)):  # another place of this run, the same place of another
        destination = shard(folder, 0)
        assert source.stat().st_size == destination.stat().st_size
        original = destination.read_bytes()
        shutil.copy(source, destination)
        offline = OfflineFeatures(folder, SETTINGS)
        with pytest.raises(ValueError, match="shard-00000.safetensors is not the shard that manifest.json says"):
            offline[1]
        with pytest.raises(ValueError, match="1 of 8 shards were changed: .*shard-00000.*Remove them"):
            verify(offline)
        destination.write_bytes(original)


@pytest.mark.parametrize("place", ["header", "data"])
def test_a_corrupted_shard_is_found(folder, place):
    content = bytearray(shard(folder, 3).read_bytes())
    content[20 if place == "header" else -40] ^= 0x01
    shard(folder, 3).write_bytes(content)
    offline = OfflineFeatures(folder, SETTINGS)
    if place == "header":
        with pytest.raises(ValueError, match="shard-00003.safetensors"):
            offline[6]
    with pytest.raises(ValueError, match="1 of 8 shards were changed: .*shard-00003.safetensors: its content"):
        verify(offline)
    assert torch.isfinite(offline[0]["context"]).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found_at_load_with_shard_and_sample(folder, rows, value):
    path = shard(folder, 0)
    poison(path, value)
    offline = OfflineFeatures(folder, SETTINGS)
    assert len(offline[0]["context"]) == 5
    with pytest.raises(ValueError, match="shard-00000.safetensors: context of sample 1 is not finite"):
        offline[1]
    loader = DataLoader(SampleDataset(rows, offline), batch_size=2, num_workers=1, collate_fn=collate)
    with pytest.raises(ValueError, match="shard-00000.safetensors: context of sample 1 is not finite"):
        next(iter(loader))

    def claim(facts):  # even when its hash says that it was written so
        facts["shards"][0]["sha256"] = feature_store.hashlib.sha256(path.read_bytes()).hexdigest()

    edit_manifest(folder, claim)
    with pytest.raises(ValueError, match="context of sample 1 is not finite"):
        verify(OfflineFeatures(folder, SETTINGS))


def poison(path: Path, value: float) -> None:
    """Put `value` in the second sample of the shard, everything else as it was."""
    with feature_store.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["context"][5 + 3, 1, 7] = value
    size = path.stat().st_size
    save_file(tensors, path, metadata)
    assert path.stat().st_size == size


def test_features_that_are_not_finite_are_never_stored(target, config, rows, tmp_path):
    online = OnlineFeatures(target, config)

    def broken(batch):
        output = online(batch)
        output.residual[(batch["input_ids"] == rows[2]["input_ids"][1])] = math.nan
        return output

    writer = FeatureWriter(tmp_path / "features", SETTINGS, config, lengths=LENGTHS, shard_bytes=SHARD_BYTES)
    writer.start(online.head)
    with pytest.raises(ValueError, match=r"train.jsonl:\d+: sample \d+: the target's context holds NaN"):
        extract(broken, rows, writer, batch_tokens=1)
    assert not any("partial" in name for name in tree(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "manifest.json is not a manifest of features: "),
        ('{"weight_map": {}}', "manifest.json is not a manifest of features: 'format'"),
        ('{"format": "hyperdflash-features-9"}', "format 'hyperdflash-features-9' instead of"),
        ('{"format": "hyperdflash-features-1"}', "is not a manifest of features: .*settings"),
    ],
)
def test_what_is_no_manifest_is_refused(folder, content, message):
    (folder / "train" / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        OfflineFeatures(folder, SETTINGS)


def test_an_incomplete_folder_is_refused(target, config, tmp_path):
    writer = FeatureWriter(tmp_path / "features", SETTINGS, config, lengths=LENGTHS, shard_bytes=SHARD_BYTES)
    writer.start(TargetHead.from_target(target))
    for index in SHARDS[0]:
        writer.add(index, random_sample(index, LENGTHS[index]))
    with pytest.raises(
        ValueError, match=r"is not complete \(1 shards so far\): `hyperdflash features RECIPE` resumes"
    ):
        OfflineFeatures(tmp_path / "features", SETTINGS)
    with pytest.raises(FileNotFoundError, match="no features in .*nowhere.*hyperdflash features RECIPE"):
        OfflineFeatures(tmp_path / "nowhere", SETTINGS)


# ------------------------------------------------------------------------------------------- disks, paths, the command


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(config, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000))
    # 98 tokens x 128 bytes, and embedding and head of 64 x 32 in bf16
    with pytest.raises(OSError, match="do not fit.*98 of 98 tokens to write, 128 bytes each: 20.2 KiB in .* free"):
        FeatureWriter(tmp_path / "features", SETTINGS, config, lengths=LENGTHS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails_at", [1, 2, 3, 6, 8])
def test_a_disk_that_fills_up_leaves_no_half_written_file(target, config, tmp_path, monkeypatch, fails_at):
    calls, sync = [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            OSError, match=r"(shard-0000.*|manifest.json|head\.\w+) was not written: No space left"
        ) as found:
            write_random(tmp_path / "features", target, config)
    assert found.value.errno == errno.ENOSPC
    assert not any("partial" in name for name in tree(tmp_path))
    want = tree(write_random(tmp_path / "whole", target, config))
    assert tree(write_random(tmp_path / "features", target, config)) == want


def test_a_write_that_breaks_in_the_middle_leaves_no_half_written_file(target, config, tmp_path):
    lengths = [100, 100, 1000]  # 12.8 kB, and a shard of 128 kB

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, 64_000))
        with pytest.raises(OSError, match="shard-00002.safetensors was not written: File too large"):
            write_random(tmp_path / "features", target, config, lengths)

    assert os.waitpid(fork(limited), 0)[1] == 0
    names = sorted(path.name for path in (tmp_path / "features" / "train").iterdir())
    assert names == ["manifest.json", "shard-00000.safetensors", "shard-00001.safetensors"]
    assert FeatureWriter(tmp_path / "features", SETTINGS, config, lengths=lengths).missing == [range(2, 3)]


def test_folders_that_cannot_be_written_are_refused_before_any_work(config, tmp_path):
    """https://github.com/vllm-project/speculators/pull/743"""
    (tmp_path / "file").write_text("")
    foreign = tmp_path / "foreign"
    (foreign / "train").mkdir(parents=True)
    (foreign / "train" / "photo.png").write_text("")
    for folder, error, message in (
        (tmp_path / "absent" / "features", FileNotFoundError, "absent is not a folder; make it first"),
        (tmp_path / "file", NotADirectoryError, "file is not a folder"),
        (foreign, FileExistsError, "holds photo.png but no manifest.json"),
    ):
        with pytest.raises(error, match=message):
            FeatureWriter(folder, SETTINGS, config, lengths=LENGTHS)


def test_a_read_only_folder_is_refused_before_any_work(config):
    """https://github.com/vllm-project/speculators/pull/743"""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o555)

    def as_nobody():
        if os.geteuid() == 0:  # root may write anywhere
            os.setuid(65534)
        with pytest.raises(PermissionError, match=f"{parent} is not writable"):
            FeatureWriter(parent / "features", SETTINGS, config, lengths=LENGTHS)

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
    # 7 + 10 tokens of 4 x 192 in bf16
    assert "train: 17 of 17 tokens to write, 1.5 KiB each: " in out
    assert "eval: 5 of 5 tokens to write" in out
    assert f"{folder} is complete" in out
    assert {path.name for path in folder.iterdir()} == {"head.safetensors", "head.json", "train", "eval"}
    assert not (recipe.parent / "run").exists()

    def refuse(*args):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(features, "load_target_model", refuse)
    before = tree(folder)
    assert cli.main(["features", str(recipe)]) == 0
    assert cli.main(["features", str(recipe), "--verify"]) == 0
    assert "eval: 1 shards are unchanged" in capsys.readouterr().out
    assert tree(folder) == before

    assert cli.main(["features", str(recipe), "max_length=8"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hyperdflash features: the features in ")
    assert "max_length is 3072 there and 8 here" in error
    assert error.count("\n") == 1
    content = bytearray(shard(folder, 0).read_bytes())
    content[-1] ^= 1
    shard(folder, 0).write_bytes(content)
    assert cli.main(["features", str(recipe), "--verify"]) == 1
    assert "shard-00000.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("problem", ["full", "full with both", "absent", "nowhere", "unknown"])
def test_the_command_fails_in_one_line_without_loading_the_target(recipe, capsys, monkeypatch, problem):
    """https://github.com/vllm-project/speculators/pull/743"""

    def refuse(*args):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(features, "load_target_model", refuse)
    override, status, message = {
        "full": ("use_cpu=true", 1, "the features do not fit"),
        "full with both": ("use_cpu=true", 1, "eval: 5 of 5 tokens to write"),
        "absent": (f"features_dir={recipe.parent}/absent/features", 1, "absent is not a folder"),
        "nowhere": ("features_dir=null", 2, "features_dir, the folder for the features, is missing"),
        "unknown": ("feature_dir=x", 2, "unknown key 'feature_dir'"),
    }[problem]
    if problem == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    if problem == "full with both":  # either split fits, as does the head that they share
        head = 2 * 2 * 4096 * 192
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=head + 20 * 1536))
    assert cli.main(["features", str(recipe), override]) == status
    error = capsys.readouterr().err
    assert error.startswith("hyperdflash features: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (recipe.parent / "features").exists()
