"""How the tiny target is made: the start of its residual paths, its training step, its text and its criteria."""

import copy
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_v4 import random_ids, tiny_target
from torch.nn import functional as F
from transformers import DeepseekV4ForCausalLM, TrainingArguments
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from hyperdflash.generation.demo import TINY

sys.path.insert(0, str(TINY / "make"))
import criteria  # noqa: E402
import muon  # noqa: E402
import post_train  # noqa: E402
import speed  # noqa: E402
from target_config import start_hyper_connections  # noqa: E402
from train_target import TargetTrainer  # noqa: E402


def energy_outside_mean(target) -> float:
    found = criteria.look(target, random_ids(40)[0].tolist(), [5, 6, 7, 8])
    return float(found["outside"].sum() / found["energy"].sum())


def test_started_paths_stay_apart_where_the_librarys_start_merges_them():
    target = tiny_target(hc_mult=4)
    before = energy_outside_mean(target)
    start_hyper_connections(target)
    assert energy_outside_mean(target) > max(0.1, 3 * before)


def test_sublayers_read_and_write_the_paths_in_turn():
    target = tiny_target(hc_mult=4)
    start_hyper_connections(target)
    modules = [module for module in target.modules() if isinstance(module, DeepseekV4HyperConnection)]
    m = target.config.hc_mult
    reads, writes = ([module.base[first : first + m].argmax() for module in modules] for first in (0, m))
    assert reads == [s % m for s in range(len(modules))]
    assert writes == [(s + 1) % m for s in range(len(modules))]


def test_the_start_of_hyper_connections_does_not_decay(tmp_path):
    target = tiny_target(hc_mult=4)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    names = TargetTrainer(model=target, args=args).get_decay_parameter_names(target)
    assert "model.layers.0.self_attn.q_a_proj.weight" in names
    assert not [name for name in names if "_hc." in name or "hc_head" in name]


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest(tmp_path):
    target = tiny_target(hc_mult=4)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", weight_decay=0.1)
    optimizer = TargetTrainer(model=target, args=args).create_optimizer()
    names = {id(parameter): name for name, parameter in target.named_parameters()}
    groups = [{names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]
    assert sum(map(len, groups)) == len(names)
    of_muon, decayed, others = groups
    assert {"model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"} <= of_muon
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.2.mlp.gate.weight"} <= decayed
    assert {"model.layers.0.attn_hc.fn", "model.norm.weight", "model.hc_head.hc_fn"} <= others


def test_a_step_of_muon_is_orthogonal_whatever_the_gradient_and_resumes(tmp_path):
    torch.manual_seed(0)
    layer = torch.nn.ParameterDict({"experts": torch.randn(3, 8, 12), "q": torch.randn(8, 12), "norm": torch.randn(8)})
    before = {name: value.detach().clone() for name, value in layer.items()}

    def optimizer_of(model):
        return muon.make_optimizer(model, ["experts", "q"], learning_rate=0.1, weight_decay=0.0)

    optimizer = optimizer_of(layer)
    for name, value in layer.items():
        value.grad = torch.randn_like(value) * {"experts": 1e-4, "q": 1e3, "norm": 1.0}[name]
    optimizer.step()
    for name in ("experts", "q"):
        values = torch.linalg.svdvals((layer[name] - before[name]).detach() / (0.3 * 0.2 * 12**0.5))
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3
    torch.testing.assert_close((layer["norm"] - before["norm"]).abs(), torch.full((8,), 0.1))
    again = copy.deepcopy(layer)
    resumed = optimizer_of(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, its in ((layer, optimizer), (again, resumed)):
        for value, grad in zip(model.values(), (g.grad for g in layer.values()), strict=True):
            value.grad = grad.clone()
        its.step()
    for one, other in zip(layer.values(), again.values(), strict=True):
        assert torch.equal(one, other)


def test_a_sharpened_target_gives_at_temperature_1_what_it_gave_below(tmp_path):
    target, ids = tiny_target(hc_mult=4), random_ids(9)
    target.save_pretrained(tmp_path / "before")
    post_train.sharpen(tmp_path / "before", tmp_path / "after", temperature=0.4)
    sharp = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "after").eval()
    with torch.no_grad():
        torch.testing.assert_close(sharp(ids).logits, target(ids).logits / 0.4)


def test_fast_hyper_connections_compute_what_the_library_does():
    module = next(m for m in tiny_target(hc_mult=4).modules() if isinstance(m, DeepseekV4HyperConnection))
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_()
    results = []
    for forward in (DeepseekV4HyperConnection.forward, speed._forward):
        streams = torch.randn(2, 5, 4, module.fn.shape[1] // 4, generator=torch.Generator().manual_seed(1))
        streams.requires_grad_()
        module.zero_grad()
        out = forward(module, streams)
        sum((part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in out).backward()
        results.append([*out, streams.grad, *(parameter.grad.clone() for parameter in module.parameters())])
    for library, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, library, rtol=1e-4, atol=1e-5)


def test_mixing_by_products_is_the_librarys_matrix_product():
    torch.manual_seed(0)
    post, out, comb, streams = (
        torch.randn(2, 5, 4),
        torch.randn(2, 5, 8),
        torch.randn(2, 5, 4, 4),
        torch.randn(2, 5, 4, 8),
    )
    library = post.unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
    torch.testing.assert_close(speed._mix(post, out, comb, streams), library)


def test_head_loss_is_cross_entropy_over_several_chunks():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 700, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    labels = torch.randint(0, 50, (2, 700))
    labels[0, :9] = -100
    loss, accuracy = speed.head_loss(hidden, weight, labels)
    grads = torch.autograd.grad(loss, (hidden, weight))
    logits = (hidden @ weight.T).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten())
    torch.testing.assert_close(loss, expected)
    assert accuracy == pytest.approx(
        float((logits.argmax(-1) == labels.flatten())[labels.flatten() != -100].float().mean())
    )
    for ours, theirs in zip(grads, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_repeated_counts_the_4_grams_that_came_before():
    assert criteria.repeated([1, 2, 3, 4, 5, 6]) == 0
    assert criteria.repeated([1, 2, 3, 4] * 3) == pytest.approx(5 / 9)
    assert criteria.repeated([1, 2]) == 0


def test_distinct_counts_equal_answers_once():
    assert criteria.distinct([[1, 2], [1, 2], [3], [1]]) == 0.75


def test_post_training_learns_all_answers_of_a_conversation_once_and_none_that_repeat_or_were_cut(tmp_path):
    rows = [
        {"source": "a:1#1", "input_ids": [9, 8, 1, 2], "loss_mask": [0, 0, 1, 1], "finish_reason": "stop"},
        {"source": "a:1#2", "input_ids": [9, 8, 1, 2, 7, 3], "loss_mask": [0, 0, 0, 0, 0, 1], "finish_reason": "stop"},
        {"source": "a:2#1", "input_ids": [9] + [1, 2] * 8, "loss_mask": [0] + [1] * 16, "finish_reason": "stop"},
        {"source": "a:3#1", "input_ids": [9, 8, 1, 2], "loss_mask": [0, 0, 1, 1], "finish_reason": "length"},
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ((ids, mask),) = post_train.read_answers(file)
    assert ids.tolist() == [9, 8, 1, 2, 7, 3]
    assert mask.tolist() == [False, False, True, True, False, True]
    batch = post_train.pad([(ids, mask), (np.array([4]), np.array([True]))], pad_token_id=0)
    assert batch["labels"].tolist() == [[-100, -100, 1, 2, -100, 3], [4] + [-100] * 5]


def test_a_round_without_a_good_answer_says_so(tmp_path):
    cut = {"source": "a:1#1", "input_ids": [9, 8, 1], "loss_mask": [0, 0, 1], "finish_reason": "length"}
    for domain in post_train.DOMAINS:
        (tmp_path / f"answers-{domain}.jsonl").write_text(json.dumps(cut) + "\n")
    with pytest.raises(ValueError, match="every answer repeats itself or was cut: train the target longer"):
        post_train.train(None, tmp_path, None, 1, SimpleNamespace(pad_token_id=0))
