"""Where tensors lie and what waits for a device, told without one: see `pretend_device.py`."""

import pytest
import torch
from pretend_device import PretendDevice
from test_trainer import HEADS, UNEVEN, make_rows, make_trainer
from tiny_v4 import greedy, random_ids, tiny_drafter, tiny_dspark, tiny_target
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hyperdflash.generation.mtp import DeepseekV4MTP
from hyperdflash.generation_hyperdflash import _Loop
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.dataset import collate
from hyperdflash.training.target import Features


def tiny_mtp(target):
    torch.manual_seed(1)
    return DeepseekV4MTP(target.config).eval()


ASSISTANTS = {
    "drafter": tiny_drafter,
    "tapped layers": lambda target: tiny_drafter(target, context_source="hidden_layers", target_layer_ids=[0, 2]),
    "markov head": lambda target: tiny_drafter(target, draft_head="markov", markov_rank=4),
    "confidence head": lambda target: tiny_drafter(target, draft_confidence=True, verify_cost=0),
    "both heads": lambda target: tiny_drafter(target, draft_head="markov", markov_rank=4, draft_confidence=True),
    "mtp": tiny_mtp,
    "dspark": tiny_dspark,
}


def transfers_by_round(monkeypatch, device: PretendDevice) -> list[int]:
    """Filled during a call with the transfers that our lines ask for in each of its rounds."""
    transfers, own, accept, start = [], _Loop.propose, _Loop.accept, [0]

    def count():
        return sum(n for part in (device.reads, device.writes) for line, n in part.items() if line != "library")

    def propose(self, *args):
        start[0] = count()
        return own(self, *args)

    def finish(self, *args, first=False):
        result = accept(self, *args, first)
        if not first:
            transfers.append(count() - start[0])
        return result

    monkeypatch.setattr(_Loop, "propose", propose)
    monkeypatch.setattr(_Loop, "accept", finish)
    return transfers


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ASSISTANTS, "drafter, prompt beside the target"])
def test_a_round_is_one_transfer_to_the_host(monkeypatch, name):
    """Two with a confidence head, which decides how many drafts there are before any is made."""
    target = tiny_target()
    drafter, prompt = ASSISTANTS[name.split(",")[0]](target), random_ids(9)
    for sampling in ({}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}):
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **sampling}
        torch.manual_seed(0)
        want = target.generate(prompt, assistant_model=drafter, **options)
        with monkeypatch.context() as patch, PretendDevice() as device:
            device.move(target, drafter)
            transfers = transfers_by_round(patch, device)
            ids = prompt.to(device.device) if "beside" in name else prompt
            torch.manual_seed(0)
            got = target.generate(ids, assistant_model=drafter, **options)
            assert got.device == ids.device
        assert got.tolist() == want.tolist()
        assert len(transfers) > 2
        assert max(transfers) == (2 if drafter.config.to_dict().get("draft_confidence") else 1), device.reads


class OnThePromptsDevice(LogitsProcessor):
    """A processor of the user's that holds a tensor where the prompt is, which plain decoding's scores are too."""

    def __init__(self, ids):
        self.bias = torch.zeros(1, 64, device=ids.device)

    def __call__(self, input_ids, scores):
        return scores + self.bias + 0 * input_ids[:, -1:]


def test_processors_see_the_prompts_device_as_in_plain_decoding():
    target, prompt = tiny_target(), random_ids(9)
    want = greedy(target, prompt, 10)
    with PretendDevice() as device:
        device.move(target)
        drafter = tiny_drafter(target)
        device.move(drafter)
        for ids in (prompt, prompt.to(device.device)):
            processors = LogitsProcessorList([OnThePromptsDevice(ids)])
            for options in ({}, {"assistant_model": drafter}):
                out = greedy(
                    target,
                    ids,
                    10,
                    logits_processor=processors,
                    return_dict_in_generate=True,
                    output_scores=True,
                    output_logits=True,
                    **options,
                )
                assert {x.device for x in (out.sequences, *out.scores, *out.logits)} == {ids.device}
                assert out.sequences.tolist() == want.tolist()


@pytest.mark.parametrize("beside", [False, True], ids=["prompt on the CPU", "prompt beside the target"])
def test_a_criterion_sees_the_prompts_device_and_logits_stay_on_the_targets(beside):
    target, prompt, seen = tiny_target(), random_ids(9), []
    drafter = tiny_drafter(target)
    want = greedy(target, prompt, 10)
    with PretendDevice() as device:
        device.move(target, drafter)
        ids = prompt.to(device.device) if beside else prompt

        def watch(input_ids, scores, **kwargs):
            seen.append((input_ids.device, input_ids.shape[1]))
            return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

        criteria = StoppingCriteriaList([watch])
        got = greedy(target, ids, 10, assistant_model=drafter, stopping_criteria=criteria)
        assert got.device == ids.device
        assert seen == [(ids.device, length) for length in range(10, 20)]
        assert device.largest_read < target.config.vocab_size  # ids alone
    assert got.tolist() == want.tolist()


def test_a_drafter_on_another_kind_of_device_drafts_and_is_told_of(caplog):
    target, prompt = tiny_target(), random_ids(9)
    want = greedy(target, prompt, 10)
    for there in ("target", "drafter"):
        drafter = tiny_drafter(target)
        with PretendDevice() as device:
            device.move({"target": target, "drafter": drafter}[there])
            assert greedy(target, prompt, 10, assistant_model=drafter).tolist() == want.tolist()
        target = tiny_target()
    messages = [record.message for record in caplog.records if "drafter.to(target.device)" in record.message]
    assert messages[0].startswith("the drafter is on cpu and the target on cuda")
    assert messages[1].startswith("the drafter is on cuda and the target on cpu")
    assert len(messages) == 2


def test_the_pretended_device_refuses_what_a_real_one_refuses():
    with PretendDevice() as device:
        there, here = torch.zeros(2, device=device.device), torch.zeros(2)
        assert there.device == (there + 1).device == there[:1].device == device.device
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            there + here
        assert not device.reads
        assert (there.sum() + 1).item() == 1
        assert there.cpu().device.type == "cpu"
        assert there[[0]].shape == (1,)
    assert device.reads.total() == 2
    assert device.writes.total() == 1


@pytest.mark.parametrize("part", ["all", "some"])
def test_an_offloaded_drafter_is_refused_by_name(part):
    from accelerate import cpu_offload

    target = tiny_target()
    for drafter in (tiny_drafter(target), tiny_mtp(target)):
        cpu_offload(drafter if part == "all" else drafter.norm, execution_device="cpu")
        with pytest.raises(ValueError, match="on the meta device .* or they are offloaded"):
            greedy(target, random_ids(5), 4, assistant_model=drafter)


def test_flex_attention_on_the_cpu_is_refused_by_name():
    """torch's kernel of it for the CPU crashes the process on blocks as short as a draft."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' does not draft on the CPU"):
        greedy(target, random_ids(5), 4, assistant_model=drafter)


@pytest.mark.parametrize("heads", [{}, HEADS], ids=["plain", "heads"])
def test_a_micro_batch_of_training_waits_for_nothing(tmp_path, monkeypatch, heads):
    """From the batch on the device to its loss, whose value nobody looks at before the step."""
    target = tiny_target(num_hash_layers=1)
    drafter = tiny_drafter(target, block_size=4, **heads)
    trainer = make_trainer(tmp_path, make_rows(UNEVEN), model=drafter.train(), target=target, num_anchors=6)
    batch = trainer._add_blocks(collate([trainer.train_dataset[i] for i in range(len(UNEVEN))]), 0)
    counts = (batch["blocks"]["labels"] != -100).sum(0)
    with torch.no_grad(), ResidualTap(target) as tap:
        target.model(batch["input_ids"], use_cache=False)
        residual = tap.take()
    with PretendDevice() as device:
        device.move(drafter)
        monkeypatch.setattr(type(trainer.args), "device", device.device)
        head = trainer.head
        modules = (*head.norm.parameters(), *head.hc_head.parameters())
        for tensor in (*head.tensors.values(), *modules, head.lm_head, head.embedding, trainer.lm_head):
            tensor.pretended = device.device
        trainer._start_window()
        there = residual.to(device.device)
        trainer.features = lambda inputs: Features(there, there)
        batch = {name: x.to(device.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        blocks = batch["blocks"].items()
        batch["blocks"] = {name: x.to(device.device) if isinstance(x, torch.Tensor) else x for name, x in blocks}
        counts = counts.to(device.device)
        device.reads.clear()
        device.writes.clear()
        loss = trainer.compute_loss(drafter, batch, num_items_in_batch=counts)
        assert loss.device == device.device
    assert not +device.reads
    assert not +device.writes
