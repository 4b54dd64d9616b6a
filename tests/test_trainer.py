"""The Trainer: gradients that do not depend on the cut of a batch, exact resuming, adapters, precision, evaluation."""

import copy
from pathlib import Path

import datasets
import pytest
import torch
from fresh import run_ranks
from tiny_v4 import MASK_TOKEN_ID, random_ids, tiny_drafter, tiny_target

from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.training.arguments import HyperDFlashTrainingArguments
from hyperdflash.training.dataset import NO_SAMPLE, EpochSampler, SampleDataset, collate
from hyperdflash.training.target import OnlineFeatures
from hyperdflash.training.train import with_lora
from hyperdflash.training.trainer import HyperDFlashTrainer

ALL_ANCHORS = 1000  # more than any sample has: every legal anchor is drawn, so nothing is random


def make_rows(lengths, *, prompt=2, seed=0) -> datasets.Dataset:
    """Random rows whose first `prompt` tokens are not supervised."""
    ids = [random_ids(n, seed=seed + i)[0].tolist() for i, n in enumerate(lengths)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": ids,
            "loss_mask": [[0] * min(prompt, n) + [1] * (n - prompt) for n in lengths],
            "length": list(lengths),
        }
    )


def one_step_of_sgd(folder, **options) -> HyperDFlashTrainingArguments:
    """With every anchor and without clipping, so that the step is the gradient; `options` win."""
    defaults = {
        "output_dir": str(folder),
        "target": "tiny",
        "train_data": ["none"],
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "num_anchors": ALL_ANCHORS,
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return HyperDFlashTrainingArguments(**{**defaults, **options})


def make_trainer(folder, rows, *, model=None, target=None, eval_rows=None, **options) -> HyperDFlashTrainer:
    target = target or tiny_target(num_hash_layers=1)
    model = model or tiny_drafter(target, block_size=4).train()
    features = OnlineFeatures(target, HyperDFlashModel.config_class(**tiny_drafter_config_of(model)))
    return HyperDFlashTrainer(
        model,
        one_step_of_sgd(folder, **options),
        features=features,
        target=target,
        train_dataset=SampleDataset(rows),
        eval_dataset=None if eval_rows is None else SampleDataset(eval_rows),
    )


def tiny_drafter_config_of(model) -> dict:
    config = model.config if isinstance(model, HyperDFlashModel) else model.get_base_model().config
    return config.to_dict()


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(got, expected, **tolerance):
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


UNEVEN = (5, 12, 30, 3, 21, 8, 17, 4)


# -------------------------------------------------------------------------------------------------------- the gradient


HEADS = {"draft_head": "markov", "markov_rank": 8, "markov_gate": True, "draft_confidence": True}


@pytest.mark.slow
@pytest.mark.parametrize("heads", [{}, HEADS], ids=["plain", "heads"])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_a_step_does_not_depend_on_how_its_batch_is_cut(tmp_path, batch_size, accumulation, heads):
    """Logged loss and new weights, for samples of very uneven lengths, clipping included.

    https://github.com/huggingface/transformers/issues/37766
    """
    cut = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    target = tiny_target(num_hash_layers=1)
    drafters = [tiny_drafter(target, block_size=4, **heads).train() for _ in range(2)]
    trainers = [
        make_trainer(tmp_path, make_rows(UNEVEN), model=m, target=target, num_anchors=6, max_grad_norm=0.5, **options)
        for m, options in zip(drafters, ({}, cut), strict=True)
    ]
    for trainer in trainers:
        trainer.train()
    assert losses(trainers[1]) == pytest.approx(losses(trainers[0]), abs=1e-5)
    assert_same_weights(*(weights(t.model) for t in trainers), atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [{}, HEADS], ids=["plain", "heads"])
def test_logged_train_loss_is_the_evaluation_loss_of_the_same_samples(tmp_path, heads):
    """https://github.com/huggingface/transformers/issues/37766"""
    rows, target = make_rows(UNEVEN), tiny_target(num_hash_layers=1)
    figures = {}
    for accumulation in (1, 2, 4):
        trainer = make_trainer(
            tmp_path,
            rows,
            model=tiny_drafter(target, block_size=4, **heads).train(),
            target=target,
            eval_rows=rows,
            learning_rate=0.0,
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=8 // accumulation,
            per_device_eval_batch_size=3,
        )
        trainer.train()
        evaluation = trainer.evaluate()
        log = trainer.state.log_history[0]
        for name in ("loss", "ce", "kl", "expected_acceptance_length"):
            figures.setdefault(name, []).extend([log[name], evaluation[f"eval_{name}"]])
    for name, values in figures.items():
        assert values == pytest.approx([values[0]] * len(values), abs=1e-4), name


def test_samples_of_other_lengths_in_the_batch_change_nothing(tmp_path):
    """Pads are never anchors, context or labels, although the pad id is a token like any other.

    https://github.com/sgl-project/SpecForge/issues/471
    """
    rows = make_rows((5, 12, 30))
    trainer = make_trainer(tmp_path, rows)
    dataset = trainer.train_dataset

    def sums(samples):
        batch = trainer._add_blocks(collate(samples), 0)
        return trainer.compute_loss(trainer.model.eval(), batch, return_outputs=True)[1].detach()

    together = sums([dataset[i] for i in range(3)])
    for i in range(3):
        torch.testing.assert_close(together[i], sums([dataset[i]])[0], atol=1e-4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [{}, HEADS], ids=["plain", "heads"])
def test_a_batch_without_targets_adds_nothing_and_is_told_of(tmp_path, heads):
    """Alone, and inside an accumulation window.

    https://github.com/NVIDIA-NeMo/Automodel/pull/3797
    """
    target = tiny_target(num_hash_layers=1)

    def make(*args, **options):
        model = tiny_drafter(target, block_size=4, **heads).train()
        return make_trainer(*args, model=model, target=target, **options)

    rows = make_rows((12, 9))
    silent = rows.map(lambda row: {"loss_mask": [0] * row["length"]})
    both = datasets.concatenate_datasets([rows, silent])
    plain = make(tmp_path, rows, per_device_train_batch_size=2)
    mixed = make(tmp_path, both, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    alone = make(tmp_path, silent, per_device_train_batch_size=2)
    start = weights(alone.model)
    for trainer in (plain, mixed, alone):
        trainer.train()
    assert_same_weights(weights(mixed.model), weights(plain.model), atol=1e-6, rtol=1e-4)
    assert_same_weights(weights(alone.model), start, atol=0, rtol=0)
    assert losses(alone) == [0.0]
    assert mixed.state.log_history[0]["batches_without_targets"] == 2
    filled = make(tmp_path, rows, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    filled.train()  # two samples and two fillers of the epoch's last batch, which are nothing to tell of
    assert_same_weights(weights(filled.model), weights(plain.model), atol=1e-6, rtol=1e-4)
    assert "batches_without_targets" not in filled.state.log_history[0]
    assert "batches_without_targets" not in plain.state.log_history[0]


def test_prompt_tokens_get_no_loss(tmp_path):
    """With the library's default for unused columns, the mask still arrives.

    https://github.com/huggingface/transformers/issues/19599
    """
    rows = make_rows((16,), prompt=8)
    other = rows.map(lambda row: {"input_ids": row["input_ids"][:8] + [5] * 8})
    trainer = make_trainer(tmp_path, rows)
    batch = trainer._add_blocks(collate([trainer.train_dataset[0]]), 0)
    assert batch["blocks"]["anchors"].tolist() == [8, 9, 10, 11, 12, 13, 14]
    labels = batch["blocks"]["labels"]
    assert set(labels[labels != -100].tolist()) <= set(rows[0]["input_ids"][9:])
    batch = trainer._add_blocks(collate([SampleDataset(other)[0]]), 0)
    assert set(batch["blocks"]["labels"].flatten().tolist()) == {5, -100}


def test_every_parameter_is_trained_and_the_target_is_none_of_them(tmp_path):
    """https://github.com/pytorch/pytorch/issues/104690 https://github.com/NVIDIA-BioNeMo/KERMT/issues/23
    https://github.com/mindspore-ai/hyper-parallel/issues/926
    """
    target = tiny_target()
    target.train()
    target.model.layers[0].eval()  # flags as a caller may leave them
    flags = [module.training for module in target.modules()]
    requires_grad = [p.requires_grad for p in target.parameters()]
    before = copy.deepcopy(target.state_dict())
    trainer = make_trainer(tmp_path, make_rows(UNEVEN), target=target)
    trainer.train()
    trained = {id(p) for p in trainer.model.parameters()}
    assert all(p.requires_grad and torch.isfinite(p).all() for p in trainer.model.parameters())
    assert trained == {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in target.parameters()}
    assert not any("embed" in name or "lm_head" in name for name in trainer.model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert all(p.grad is None for p in target.parameters())
    assert [module.training for module in target.modules()] == flags
    assert [p.requires_grad for p in target.parameters()] == requires_grad

    trainer.model.zero_grad()
    batch = trainer._add_blocks(collate([trainer.train_dataset[i] for i in range(8)]), 0)
    trainer.compute_loss(trainer.model.train(), batch).backward()
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("lora", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(tmp_path, reentrant, lora):
    """https://github.com/huggingface/transformers/issues/23170"""
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = tiny_drafter(tiny_target(), block_size=4).train()
        if lora:
            model = with_lora(model, {"r": 4, "init_lora_weights": False})
        trainer = make_trainer(
            tmp_path,
            make_rows(UNEVEN),
            model=model,
            activation_checkpointing=checkpointing,
            activation_checkpointing_kwargs={"use_reentrant": reentrant} if checkpointing else None,
        )
        trainer.train()
        results.append(weights(trainer.model))
    assert_same_weights(*results, atol=1e-6, rtol=1e-5)


def test_a_loss_that_is_not_finite_stops_and_names_the_samples(tmp_path):
    rows = make_rows((12, 9))
    trainer = make_trainer(tmp_path, rows, per_device_train_batch_size=2)
    with torch.no_grad():
        trainer.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"the loss is nan at step 0, samples \[[01], [01]\]"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_the_step_and_the_last_checkpoint_stays(
    tmp_path, monkeypatch, value, max_grad_norm
):
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_grad_norm": max_grad_norm}
    trainer = make_trainer(tmp_path, make_rows((12, 9)), max_steps=3, **options)
    backward = trainer.accelerator.backward

    def spoil(loss, **kwargs):
        backward(loss, **kwargs)
        if trainer.state.global_step == 1:
            trainer.model.norm.weight.grad[0] = value

    monkeypatch.setattr(trainer.accelerator, "backward", spoil)
    with pytest.raises(ValueError, match=r"gradient's norm is (nan|inf) at step 1: no step was taken"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    saved = HyperDFlashModel.from_pretrained(tmp_path / "checkpoint-1", dtype=torch.float32)
    assert_same_weights(weights(trainer.model), weights(saved), atol=0, rtol=0)


# ----------------------------------------------------------------------------------------------------------- the order


def test_an_epoch_has_every_sample_once_in_whole_batches():
    sampler = EpochSampler([1] * 10, batch_size=4, seed=0)
    first = list(sampler)
    assert sorted(first) == [NO_SAMPLE, NO_SAMPLE, *range(10)]
    assert len(sampler) == 12
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(EpochSampler([1] * 10, batch_size=4, seed=1)) != first


def test_batches_by_length_waste_little():
    lengths = torch.randint(5, 500, (400,), generator=torch.Generator().manual_seed(0)).tolist()

    def padded(group_by_length):
        order = list(EpochSampler(lengths, 8, seed=0, group_by_length=group_by_length))
        assert sorted(order) == list(range(400))
        batches = [order[i : i + 8] for i in range(0, 400, 8)]
        return sum(max(lengths[i] for i in batch) * 8 for batch in batches)

    assert padded(True) < 1.05 * sum(lengths) < 1.4 * sum(lengths) < padded(False)
    first_batches = [max(lengths[i] for i in list(EpochSampler(lengths, 8, s, True))[:8]) for s in range(10)]
    assert max(first_batches) > 1.5 * min(first_batches)  # long ones are not all at the start


# ------------------------------------------------------------------------------------------------------------ resuming

ADAMW = {
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "num_anchors": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 8,
    "save_strategy": "steps",
    "train_sampling_strategy": "group_by_length",
}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, stop):
    """In the middle of an epoch and at its end (4 steps of 4 samples: 14 of them), with loader workers."""
    rows = make_rows([5 + 3 * i for i in range(14)])
    options = {**ADAMW, "save_steps": stop, "dataloader_num_workers": 2}
    whole = make_trainer(tmp_path / "whole", rows, **options)
    whole.train()
    torch.manual_seed(123)
    torch.rand(7)
    resumed = make_trainer(tmp_path / "whole", rows, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert losses(resumed) == losses(whole)
    assert_same_weights(weights(resumed.model), weights(whole.model), atol=0, rtol=0)


@pytest.mark.slow
def test_small_updates_survive_bf16_and_resuming(tmp_path):
    """Masters stay fp32 before saving, in the file and after resuming, and four resumes change nothing.

    https://github.com/NVIDIA/Model-Optimizer/pull/2322
    """
    from safetensors.torch import load_file

    rows = make_rows([9, 12, 7, 15])
    options = {**ADAMW, "bf16": True, "learning_rate": 1e-6, "max_steps": 20, "save_steps": 4}
    whole = make_trainer(tmp_path / "whole", rows, **options)
    start = weights(whole.model)
    whole.train()
    assert all(p.dtype == torch.float32 for p in whole.model.parameters())
    folder = tmp_path / "parts"
    for part in range(5):
        trainer = make_trainer(folder, rows, **options)
        if part < 4:
            trainer.add_callback(_StopAt(4 * (part + 1)))
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{4 * part}") if part else None)
    assert_same_weights(weights(trainer.model), weights(whole.model), atol=0, rtol=0)
    saved = load_file(folder / "checkpoint-20" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    moved = [
        not torch.equal(p.bfloat16(), p) and not torch.equal(p, start[n]) for n, p in whole.model.named_parameters()
    ]
    assert any(moved)  # updates far below bf16's resolution of the weights are there


def _stop_callback():
    from transformers import TrainerCallback

    class StopAt(TrainerCallback):
        def __init__(self, step):
            self.step = step

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step >= self.step

    return StopAt


_StopAt = _stop_callback()


# ---------------------------------------------------------------------------------------- compilation, LoRA, processes


@pytest.mark.slow
def test_compiled_training_saves_plain_names_and_resumes_without_compiling(tmp_path):
    """https://github.com/MakazhanAlpamys/Soup/issues/351"""
    rows = make_rows([9] * 8)
    options = {**ADAMW, "max_steps": 2, "save_steps": 2}
    compiled = make_trainer(tmp_path, rows, torch_compile=True, torch_compile_backend="aot_eager", **options)
    compiled.train()
    loaded = HyperDFlashModel.from_pretrained(tmp_path / "checkpoint-2")
    trained = {name.removeprefix("_orig_mod."): value for name, value in weights(compiled.model).items()}
    assert_same_weights(weights(loaded), trained, atol=0, rtol=0)
    for file in tmp_path.rglob("*.safetensors"):
        from safetensors import safe_open

        with safe_open(file, "pt") as stored:
            assert not [key for key in stored.keys() if key.startswith(("_orig_mod", "module"))]  # noqa: SIM118
    plain = make_trainer(tmp_path, rows, **{**options, "max_steps": 3})
    plain.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert plain.state.global_step == 3


def through_a_reducer(dtype, compiled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """What a reducer makes of a huge residual, and the gradient of its gate."""
    reducer = tiny_drafter(tiny_target()).reducer
    residual = (torch.randn(2, 5, 2, 32, generator=torch.Generator().manual_seed(0)) * 1e3).to(dtype)
    out = (torch.compile(reducer, backend="inductor") if compiled else reducer)(residual)
    out.float().square().mean().backward()
    return out.detach().float(), reducer.hc_fn.grad.clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reducer_of_huge_streams_is_finite(dtype):
    """https://github.com/unslothai/unsloth-zoo/pull/859"""
    assert all(torch.isfinite(tensor).all() for tensor in through_a_reducer(dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiled_reducer_of_huge_streams_gives_the_same(dtype):
    for eager, compiled in zip(through_a_reducer(dtype), through_a_reducer(dtype, compiled=True), strict=True):
        torch.testing.assert_close(eager, compiled, atol=1e-4, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4)


def test_lora_trains_adapters_and_the_whole_reducer_and_heads(tmp_path):
    """All are in the saved adapter; nothing else moves.

    https://github.com/huggingface/peft/issues/899
    """
    from safetensors.torch import load_file

    model = with_lora(tiny_drafter(tiny_target(), block_size=4, **HEADS).train(), {"r": 4})
    before = weights(model)
    trainer = make_trainer(tmp_path, make_rows(UNEVEN), model=model, save_strategy="steps", save_steps=1)
    trainer.train()
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    assert {"hc_fn", "hc_base", "hc_scale", "path_norm"} <= {name.rsplit(".", 1)[-1] for name in moved}
    assert any("markov_w2" in name for name in moved)
    assert any("confidence_head" in name for name in moved)
    assert any("lora_B" in name for name in moved)
    saved = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    assert any("lora_A" in name for name in saved)
    assert any("reducer" in name and name.endswith("hc_fn") for name in saved)
    assert any(name.endswith("markov_w1") for name in saved)


def test_lora_keeps_what_else_is_to_be_trained_whole():
    model = with_lora(tiny_drafter(tiny_target()), {"r": 4, "modules_to_save": ["context_norm"]})
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("context_norm.modules_to_save" in name for name in trained)
    assert any("reducer.modules_to_save" in name for name in trained)


LENGTHS = {"uneven": UNEVEN, "one has all": (30, 2, 2, 2, 2, 2), "few": (9, 14, 11)}

# Everything that is run in two processes, in the same two: their start is dearer than the runs
TWO_PROCESSES = """
import sys, torch
torch.set_num_threads(1)
import test_trainer as t
folder = sys.argv[1]
options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, ddp_backend="gloo",
               ddp_find_unused_parameters=False)

def run(name, trainer):
    trainer.train()
    assert trainer.args.world_size == 2
    result = {"weights": t.weights(trainer.accelerator.unwrap_model(trainer.model)), "losses": t.losses(trainer)}
    if trainer.eval_dataset is not None:
        result["eval_loss"] = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        torch.save(result, f"{folder}/{name}.pt")

for name, lengths in t.LENGTHS.items():
    rows = t.make_rows(lengths)
    run(name, t.make_trainer(f"{folder}/{name}", rows, num_anchors=6, max_grad_norm=0.5, eval_rows=rows, **options))
trainer = t.make_lora_trainer(folder + "/lora", **options)
run("lora", trainer)
trainer.accelerator.end_training()
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """The folder of the results of `TWO_PROCESSES`, by name."""
    folder = tmp_path_factory.mktemp("two processes")
    run_ranks(TWO_PROCESSES, folder, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LENGTHS)
def test_two_processes_take_the_step_of_one(tmp_path, two_processes, name):
    """Uneven label counts; processes without any supervised position; fewer samples than places in a step.

    https://github.com/huggingface/transformers/issues/34242
    """
    two = torch.load(two_processes / f"{name}.pt")
    rows = make_rows(LENGTHS[name])
    one = make_trainer(tmp_path, rows, num_anchors=6, max_grad_norm=0.5, eval_rows=rows)
    one.train()
    assert two["losses"] == pytest.approx(losses(one), abs=1e-5)
    assert_same_weights(two["weights"], weights(one.model), atol=1e-6, rtol=1e-4)
    assert two["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"], abs=1e-5)


def make_lora_trainer(folder, **options):
    torch.manual_seed(0)
    model = with_lora(tiny_drafter(tiny_target(), block_size=4).train(), {"r": 4})
    return make_trainer(
        folder, make_rows(UNEVEN), model=model, num_anchors=6, activation_checkpointing=True, max_steps=2, **options
    )


@pytest.mark.slow
def test_lora_in_two_processes_with_activation_checkpointing_is_that_in_one(tmp_path, two_processes):
    """peft keeps an unused original of the reducer; it is frozen, so DDP does not wait for it.

    https://github.com/huggingface/peft/issues/899
    """
    one = make_lora_trainer(tmp_path)
    one.train()
    two = torch.load(two_processes / "lora.pt")["weights"]
    assert_same_weights(two, weights(one.model), atol=1e-5, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.slow
def test_evaluation_keeps_sums_alone_and_repeats_itself(tmp_path):
    """Fixed anchors: twice the same figures, and training draws what it would have drawn without the evaluation.

    https://github.com/huggingface/transformers/issues/30104
    """
    rows = make_rows([8 + 2 * i for i in range(20)])
    options = {"num_anchors": 3, "max_steps": 4, "per_device_train_batch_size": 4}
    silent = make_trainer(tmp_path, rows, **options)
    silent.train()
    trainer = make_trainer(
        tmp_path, rows, eval_rows=rows, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=1, **options
    )
    trainer.train()
    assert losses(trainer) == losses(silent)
    first, second = (trainer.evaluate() for _ in range(2))
    assert {k: v for k, v in first.items() if "second" not in k and "runtime" not in k} == {
        k: v for k, v in second.items() if "second" not in k and "runtime" not in k
    }
    output = trainer.predict(trainer.eval_dataset)
    assert output.predictions.shape == (20, 6 * 3)


def test_dropout_after_an_evaluation_is_what_it_would_have_been_without(tmp_path):
    """An evaluation's data loader draws from the global generator, which dropout draws from too."""
    rows, runs = make_rows(UNEVEN), []
    for evaluation in ({}, {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}):
        torch.manual_seed(0)
        model = with_lora(tiny_drafter(tiny_target(), block_size=4).train(), {"r": 4, "lora_dropout": 0.5})
        runs.append(make_trainer(tmp_path, rows, model=model, eval_rows=rows, max_steps=4, **evaluation))
        runs[-1].train()
    assert losses(runs[1]) == losses(runs[0])
    assert_same_weights(weights(runs[1].model), weights(runs[0].model), atol=0, rtol=0)


def test_the_best_checkpoint_is_found_by_the_loss_without_further_settings(tmp_path):
    """https://github.com/huggingface/transformers/issues/33193"""
    rows = make_rows([12] * 4)
    trainer = make_trainer(
        tmp_path,
        rows,
        eval_rows=rows,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        max_steps=3,
        learning_rate=30.0,  # so large that the first step is the best
    )
    trainer.train()
    evaluations = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    best = min(evaluations, key=evaluations.get)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluations[best], abs=1e-6)


# -------------------------------------------------------------------------------------------- training is for decoding


@pytest.mark.slow
def test_a_drafter_that_learned_texts_by_heart_drafts_them(tmp_path):
    """Overfit on four sequences that the target wrote; decoding from their prompts then accepts more than 90% of what
    is proposed, the last round of each run left out. This crosses masks, positions, mask token, tap, and decoding.

    https://github.com/sgl-project/SpecForge/issues/455
    """
    target = tiny_target(num_hash_layers=1)
    prompts = [random_ids(6 + i, seed=i) for i in range(4)]
    texts = [target.generate(p, max_new_tokens=40, do_sample=False)[0] for p in prompts]
    rows = datasets.Dataset.from_dict(
        {
            "input_ids": [text.tolist() for text in texts],
            "loss_mask": [[0] * p.shape[1] + [1] * (len(t) - p.shape[1]) for p, t in zip(prompts, texts, strict=True)],
            "length": [len(text) for text in texts],
        }
    )
    drafter = tiny_drafter(target, block_size=7, intermediate_size=64, initializer_range=0.05).train()
    trainer = make_trainer(
        tmp_path,
        rows,
        target=target,
        model=drafter,
        optim="adamw_torch",
        learning_rate=4e-3,
        max_grad_norm=1.0,
        max_steps=150,
        logging_steps=100,
        lr_scheduler_type="cosine",
        eval_rows=rows,
        eval_data=["rows"],
        eval_decode_prompts=4,
        eval_decode_max_new_tokens=40,
    )
    trainer.train()
    evaluation = trainer.evaluate()
    assert drafter.config.mask_token_id == MASK_TOKEN_ID
    drafter.eval()
    rounds = []
    accepted = proposed = 0
    for prompt in prompts:
        out = target.generate(
            prompt, assistant_model=drafter, max_new_tokens=40, do_sample=False, return_dict_in_generate=True
        )
        rounds += out.speculation.num_accepted
        accepted += sum(out.speculation.num_accepted[:-1])
        proposed += sum(out.speculation.num_drafts[:-1])
    assert proposed >= 60
    assert accepted > 0.9 * proposed, (accepted, proposed)
    assert evaluation["eval_acceptance_length"] == pytest.approx(1 + sum(rounds) / len(rounds))
    assert evaluation["eval_expected_acceptance_length"] > 6
