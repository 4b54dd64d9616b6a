"""DSpark modules are trained on the blocks that they decode, with DeepSeek's loss, and saved as they are loaded."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_trainer import UNEVEN, assert_same_weights, losses, make_rows, one_step_of_sgd, weights
from tiny_v4 import features_recipe, greedy, random_ids, tiny_drafter_config, tiny_dspark, tiny_target
from transformers import AutoModelForCausalLM, DynamicCache, TrainingArguments

from hyperdflash.benchmark.methods import parse_methods
from hyperdflash.generation.demo import TINY
from hyperdflash.generation.dspark import load_dspark
from hyperdflash.generation.mtp import DeepseekV4MTP
from hyperdflash.generation_hyperdflash import DraftRequest
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.arguments import RecipeError
from hyperdflash.training.dataset import SampleDataset, collate
from hyperdflash.training.target import OnlineFeatures

sys.path.insert(0, str(TINY / "evidence"))
import train_dspark  # noqa: E402
import train_mtp  # noqa: E402

K = 5


def make_trainer(folder, rows, *, target=None, dspark=None, **options):
    """For the last two layers of a random target with a window of 8."""
    target = target or tiny_target()
    dspark = dspark or tiny_dspark(target, block_size=K).train()
    config = tiny_drafter_config(target, context_source="hidden_layers", target_layer_ids=[1, 2])
    return train_dspark.DSparkTrainer(
        dspark,
        one_step_of_sgd(folder, kl_alpha=0.0, **options),
        features=OnlineFeatures(target, config),
        train_dataset=SampleDataset(rows),
    )


def batch_of(trainer, rows):
    return trainer._add_blocks(collate(SampleDataset(rows).__getitems__(list(range(len(rows))))), 0)


@torch.no_grad()
def test_training_blocks_have_the_logits_that_decoding_drafts_from(tmp_path):
    """Two samples in one forward, and decoding anchor by anchor over a cache: contexts from one token to four windows,
    slot 0 predicting the token behind the anchor, every slot biased by the token before it."""
    target, rows = tiny_target(), make_rows((40, 13), prompt=1)
    dspark = tiny_dspark(target, block_size=K)
    trainer = make_trainer(tmp_path, rows, target=target, dspark=dspark)
    batch = batch_of(trainer, rows)
    packed = train_dspark.PackedBlocks(**batch["blocks"])
    drafted = trainer._draft(dspark, packed, **trainer._inputs(trainer.features(batch)[0], packed))
    logits = target.lm_head(drafted["last_hidden_state"]) + dspark.markov_head.markov_w2(drafted["markov_states"])
    logits, confidence = logits.view(-1, K, 64), drafted["confidence_logits"].view(-1, K)
    anchors = packed.anchors.tolist()
    assert packed.num_anchors == [38, 11]
    assert anchors == [*range(1, 39), *range(1, 12)]
    for sample, row in enumerate(rows):
        ids = torch.tensor([row["input_ids"]])
        with ResidualTap(target, dspark.tapped_layer_ids) as tap:
            target(ids, use_cache=False)
            layers = tap.take()
        cache, start = DynamicCache(config=dspark.config), 0
        for block in (packed.samples == sample).nonzero()[:, 0].tolist():
            anchor, rounds = anchors[block], []
            true = ids[0, anchor + 1 : anchor + 1 + K]
            assert packed.labels[block].tolist() == [*true.tolist(), *[-100] * (K - len(true))]

            def choose(logits, true=true, rounds=rounds):
                rounds.append(logits[0])
                return true[len(rounds) - 1 :][:1]

            noise = dspark.new_noise_ids("cpu")
            noise[0, 0] = ids[0, anchor]
            states = dspark.markov_head.markov_w1(ids[0, anchor : anchor + len(true)])
            collapsed = dspark(target.model.embed_tokens(noise), layers[:, :anchor])[1]
            estimated = dspark.confidence_head(collapsed[0, : len(true)], states)
            request = DraftRequest(layers[:, start:anchor], ids, noise, anchor, len(true), target, cache)
            dspark.propose(request, choose)
            torch.testing.assert_close(torch.stack(rounds), logits[block, : len(true)], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(estimated, confidence[block, : len(true)], atol=1e-5, rtol=1e-5)
            start = anchor


def test_the_loss_is_deepseeks(tmp_path):
    """Written out with every logit at once: CE and L1 with the weights exp(-k / gamma), and the confidence head's,
    whose gradient reaches the layers. The target's distribution is its own, of hc_head."""
    target, rows = tiny_target(), make_rows((14, 9))
    trainer = make_trainer(tmp_path, rows, target=target, gamma=3.0)
    dspark, batch = trainer.model, batch_of(trainer, rows)
    packed = train_dspark.PackedBlocks(**batch["blocks"])
    loss = trainer.compute_loss(dspark, batch)
    loss.backward()
    got = {name: parameter.grad.clone() for name, parameter in dspark.named_parameters()}
    dspark.zero_grad()

    drafted = trainer._draft(dspark, packed, **trainer._inputs(trainer.features(batch)[0], packed))
    head = target.lm_head.weight.detach()
    student = drafted["last_hidden_state"] @ head.T + dspark.markov_head.markov_w2(drafted["markov_states"])
    q, labels = student.view(-1, K, 64).softmax(-1), packed.labels
    logits = target(batch["input_ids"], use_cache=False).logits.detach()
    p = logits[packed.samples[:, None], packed.teacher_positions].softmax(-1)
    w = torch.exp(-torch.arange(K) / 3.0) * (labels != -100)
    distance = (p - q).abs().sum(-1)
    ce = -q.gather(-1, labels.clamp(min=0)[..., None])[..., 0].log()
    bce = F.binary_cross_entropy_with_logits(
        drafted["confidence_logits"].view(-1, K), 1 - distance.detach() / 2, reduction="none"
    )
    reported = (w * (0.1 * ce + 0.9 * distance)).sum() / w.sum()
    assert float(loss.detach()) == pytest.approx(float(reported.detach()), abs=1e-5)
    (reported + (w * bce).sum() / w.sum()).backward()
    assert all(gradient.abs().sum() > 0 for name, gradient in got.items() if "experts" not in name)
    assert_same_weights(
        got, {name: parameter.grad for name, parameter in dspark.named_parameters()}, atol=1e-6, rtol=1e-3
    )


@pytest.mark.slow
def test_a_step_does_not_depend_on_how_its_batch_is_cut(tmp_path):
    trainers = [
        make_trainer(tmp_path, make_rows(UNEVEN), num_anchors=6, **cut)
        for cut in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4})
    ]
    for trainer in trainers:
        trainer.train()
    assert losses(trainers[1]) == pytest.approx(losses(trainers[0]), abs=1e-5)
    assert_same_weights(*(weights(t.model) for t in trainers), atol=1e-6, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------- the script


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """For the example's target, with stored features."""
    more = ("features: offline", "learning_rate: 1e-3", "warmup_steps: 0", "max_steps: 6", "save_steps: 3")
    path = features_recipe(tmp_path, "\n".join([*more, "lr_scheduler_type: constant", "logging_steps: 1", ""]))
    path.write_text(path.read_text().replace("num_hidden_layers: 1", "block_size: 4"))
    monkeypatch.setattr(train_dspark, "RECIPE", str(path))
    return path


@pytest.mark.slow
def test_a_run_learns_and_leaves_a_module_that_decodes(tmp_path, recipe, capsys):
    """The loss falls; the folder is a method of the benchmark, has the recipe's settings, and decodes losslessly. A
    run that was stopped is resumed bit for bit, and one that has ended stays as it is."""
    overrides = ["eval_strategy=steps", "eval_steps=6", "eval_decode_prompts=1", "eval_decode_max_new_tokens=4"]
    final = train_dspark.train(overrides)
    state = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    logged = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert logged[-1] < logged[0] - 0.1
    assert state["log_history"][-1]["eval_acceptance_length"] >= 1
    assert parse_methods([f"dspark:3={final}"])[-1].name == "dspark"
    target = AutoModelForCausalLM.from_pretrained(TINY / "target")
    dspark = load_dspark(final, target.config)
    last = target.config.num_hidden_layers - 1
    assert dspark.tapped_layer_ids == [last - 2, last - 1, last]
    assert (dspark.max_drafts, dspark.config.dspark_noise_token_id, dspark.config.dspark_markov_rank) == (3, 3, 64)
    assert len(dspark.layers) == 3
    prompt = random_ids(70, vocab_size=1000)
    want = greedy(target, prompt, 8).tolist()
    assert greedy(target, prompt, 8, assistant_model=dspark).tolist() == want

    stopped = [f"output_dir={tmp_path / 'stopped'}"]  # without evaluations, which change nothing
    train_dspark.train([*stopped, "max_steps=3"])
    capsys.readouterr()
    resumed = train_dspark.train(stopped)
    assert "resuming from" in capsys.readouterr().out
    first, again = (load_file(folder / "model.safetensors") for folder in (final, resumed))
    assert first.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert train_dspark.train(stopped) == resumed
    assert "nothing is left to train" in capsys.readouterr().out
    again = load_file(resumed / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("kind", ["dspark", "mtp"])
def test_a_checkpoints_weights_are_read_whole(tmp_path, kind):
    """The library refuses the config.json of a V4 module, and leaves out what it does not know."""
    target = tiny_target()
    if kind == "dspark":
        trainer = make_trainer(tmp_path, make_rows((5,)), target=target)
    else:
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        trainer = train_mtp.MTPTrainer(DeepseekV4MTP(target.config), args, recipe=None, target=target, features=None)
    trainer.save_model(str(tmp_path / "whole"))
    before = weights(trainer.model)
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    trainer._load_from_checkpoint(str(tmp_path / "whole"))
    assert_same_weights(weights(trainer.model), before, atol=0, rtol=0)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    name, _ = tensors.popitem()
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=name):
        trainer._load_from_checkpoint(str(tmp_path / "whole"))


@pytest.mark.slow
def test_what_is_not_a_dspark_run_is_refused_by_name_and_left_as_it_is(tmp_path, recipe):
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_text("of mtp.*")
    with pytest.raises(FileExistsError, match="other is not empty: choose another"):
        train_dspark.train([f"output_dir={other}"])
    assert [path.name for path in other.iterdir()] == ["model.safetensors"]
    with pytest.raises(RecipeError, match=r"reads 'hidden_layers'; drafter.context_source is 'pre_hc_head'"):
        train_dspark.train(["drafter={mask_token_id: 3, context_source: pre_hc_head}"])
    with pytest.raises(RecipeError, match="sinks, which 'eager' knows alone; got 'sdpa'"):
        train_dspark.train(["attention=sdpa"])
    assert not (tmp_path / "run").exists()
    final = train_dspark.train(["max_steps=1"])
    facts = tmp_path / "run" / "run.json"
    drafter = json.loads(facts.read_text())["fixed"]["drafter"]
    assert drafter.pop("kind") == "dspark"
    facts.write_text(facts.read_text().replace('"kind": "dspark",', ""))  # as of a drafter with these options
    before = (final / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="was trained with drafter"):
        train_dspark.train(["max_steps=2"])
    assert (final / "model.safetensors").read_bytes() == before
