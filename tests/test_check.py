"""`hyperdflash check` names the cause of a drafter that accepts little, and finds nothing in a sound pair.

Each cause is made as it happens in the field: by a wrong value in the trained tiny drafter's config.json, by its
weights, or (marked slow) by a small drafter that learns texts of a random target by heart while something is wrong.
Features, positions and slots that are one off cannot always be told apart: the message then names all of them.
"""

import copy
import json
import math
import shutil
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_v4 import MASK_TOKEN_ID, SLIDING, nightly, random_ids, tiny_drafter, tiny_target

from hyperdflash import generation_hyperdflash
from hyperdflash.__main__ import main
from hyperdflash.benchmark.prompt_sets import read_file
from hyperdflash.check import check
from hyperdflash.check.check import CAUSE_FOUND, FAIL, OK, WARNING, examine
from hyperdflash.check.experiments import Pair
from hyperdflash.common.checkpoint import load_drafter, load_target
from hyperdflash.encoding_deepseek_v4 import encode_with_mask
from hyperdflash.generation.demo import PROMPTS, TINY
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.blocks import attention_masks, make_blocks
from hyperdflash.training.init import init_drafter

# Without heads: with them a drafter is right more often whatever is wrong with it, and causes show less
TARGET, DRAFTER, WITH_HEADS = TINY / "target", TINY / "drafter-paper", TINY / "drafter"


class SharedTexts(Pair):
    """A pair of one target: what it writes, and its residuals there, depend on no drafter but on the layers read."""

    @cached_property
    def own(self):
        layers = tuple(self.layers_read())
        if layers not in self.texts:
            self.texts[layers] = super().own
        return self.texts[layers]


class World:
    """The tiny pair in fp32, and what its target writes."""

    def __init__(self):
        self.target, tokenizer = load_target(str(TARGET), None, "float32")
        self.drafter = load_drafter(str(DRAFTER), None, "float32", self.target)
        self.special_ids = tokenizer.get_added_vocab()
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS.values()]
        self.prompts = [
            torch.tensor([encode_with_mask(chat, tokenizer, add_generation_prompt=True)[0]]) for chat in chats
        ]
        self.plain = self.pair(self.drafter, self.target).plain
        self.texts = {}

    def pair(self, drafter, target=None, **options) -> Pair:
        if target is not None:
            return Pair(target, drafter, self.prompts, special_ids=self.special_ids, **options)
        pair = SharedTexts(self.target, drafter, self.prompts, special_ids=self.special_ids, **options)
        pair.plain, pair.texts = self.plain, self.texts
        return pair


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def copied_drafter(folder, drafter=DRAFTER, *, weights=None, **changes):
    """A tiny drafter's folder, with other values in its config.json, or weights changed by `weights`."""
    folder.mkdir()
    config = json.loads((drafter / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if weights is None:
        shutil.copy(drafter / "model.safetensors", folder)
    else:
        tensors = load_file(drafter / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cause(pair):
    """The first failure, or None: what follows it is not worked out."""
    return next((finding for finding in examine(pair) if finding.status == FAIL), None)


# ------------------------------------------------------------------------------------------------------- the tiny pair


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [DRAFTER, WITH_HEADS], ids=lambda folder: folder.name)
def test_a_sound_pair_passes_without_a_warning(drafter, capsys):
    options = ["--num-prompts", "1", "--max-new-tokens", "32", "--dtype", "float32", "--threads", "1"]
    assert main(["check", str(TARGET), str(drafter), *options]) == 0
    out = capsys.readouterr().out
    lines = out.strip().splitlines()
    assert "\x1b" not in out  # plain in a pipe
    assert lines[-1] == "No cause found: the pair is sound."
    assert len(lines) > 10
    assert all(line.startswith("ok ") for line in lines[:-2])


@pytest.mark.slow
def test_the_module_in_the_targets_checkpoint_is_judged_by_decoding(capsys):
    options = ["--num-prompts", "1", "--max-new-tokens", "32", "--dtype", "float32", "--threads", "1", "--json"]
    assert main(["check", str(TARGET), "mtp", *options]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["check"] for finding in findings] == ["loading", "weights", "lossless", "acceptance"]
    assert {finding["status"] for finding in findings} == {"ok"}
    assert findings[-1]["figures"]["decoding"]["acceptance_length"] > 2


def test_a_module_that_the_targets_checkpoint_has_not_is_the_cause(monkeypatch, capsys):
    monkeypatch.setattr("hyperdflash.check.check.load_target_model", lambda *args: pytest.fail("loaded"))
    assert main(["check", str(TARGET), "dspark"]) == 3
    assert "carries a native MTP module under mtp.*, not the DSpark module" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "check_name", "words"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 160000.0}}, "rotary positions", "to 10000"),
        ({"sliding_window": 8}, "block and window", "enlarge sliding_window"),
        ({"rms_norm_eps": 0.1}, "block and window", "set rms_norm_eps to 1e-06"),
        ({"mask_token_id": 300}, "mask token", "set mask_token_id to 3"),
        ({"mask_token_id": 6}, "mask token", "set mask_token_id to 3"),
        ({"mask_token_id": 1}, "mask token", "the target's eos_token_id"),
        ({"vocab_size": 4000}, "shapes", "vocabulary 4000, but the target has 4096"),
        ({"target_num_hidden_layers": 8, "target_layer_ids": [7]}, "shapes", "number of layers 8"),
    ],
    ids=str,
)
def test_a_wrong_value_in_the_config_is_named(world, tmp_path, changes, check_name, words):
    folder = copied_drafter(tmp_path / "drafter", **changes)
    found = cause(world.pair(load_drafter(str(folder), None, "float32", world.target)))
    assert found.check == check_name
    assert words in found.sentence()


@pytest.mark.slow
def test_a_wrong_value_is_named_in_a_drafter_with_heads_too(tmp_path, capsys):
    rope = {"rope_type": "default", "rope_theta": 160000.0}
    folder = copied_drafter(tmp_path / "drafter", WITH_HEADS, rope_parameters=rope)
    options = ["--num-prompts", "1", "--dtype", "float32", "--threads", "1"]
    assert main(["check", str(TARGET), str(folder), *options]) == 3
    assert "set `rope_parameters.rope_theta` in its config to 10000" in capsys.readouterr().out.splitlines()[-1]


def spoil(tensors):
    tensors["layers.1.mlp.up_proj.weight"][3, 5] = float("nan")


def reset_layer(tensors):
    """Layer 2 as it was before any training."""
    for name, tensor in tensors.items():
        if name.startswith("layers.2."):
            tensor.fill_(1.0) if tensor.ndim == 1 else tensor.normal_(std=0.02)


@pytest.mark.parametrize(
    ("weights", "check_name", "words"),
    [
        (spoil, "weights", "layers.1.mlp.up_proj.weight hold NaN"),
        (reset_layer, "training", "layers 2 have never been trained"),
    ],
)
def test_weights_that_are_not_those_that_were_trained_are_named(world, tmp_path, weights, check_name, words):
    folder = copied_drafter(tmp_path / "drafter", weights=weights)
    found = cause(world.pair(load_drafter(str(folder), None, "float32", world.target)))
    assert found.check == check_name
    assert words in found.sentence()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_drafter_has_not_been_trained(world, tmp_path, dtype):
    folder = init_drafter(TARGET, tmp_path / "drafter", mask_token_id=3)
    found = cause(world.pair(load_drafter(str(folder), None, dtype, world.target)))
    assert found.check == "training"
    assert "has not been trained" in found.text


def another_target(world, noise):
    """As after fine-tuning: every weight of the target a little different."""
    target = copy.deepcopy(world.target)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.is_floating_point():
                parameter += noise * parameter.std(correction=0) * torch.randn_like(parameter)
    return target


@pytest.mark.slow
def test_a_target_with_other_weights_that_accepts_little_is_named_by_its_tensors(world):
    found = cause(world.pair(world.drafter, another_target(world, 1.0)))
    assert found.check == "fingerprint"
    assert "embed.weight differs" in found.text


@pytest.mark.slow
def test_a_target_with_other_weights_that_accepts_enough_is_a_warning(world):
    pair = world.pair(world.drafter, another_target(world, 0.05))
    pair.prompts = pair.prompts[:2]
    found = check.check_fingerprint(pair)
    assert found.status == WARNING
    assert "embed.weight differs" in found.text
    assert check.check_acceptance(pair).figures["decoding"]["acceptance_length"] > 2


def test_a_drafter_that_was_cast_has_rounded_rotary_frequencies(world):
    found = cause(world.pair(copy.deepcopy(world.drafter).to(torch.bfloat16)))
    assert found.check == "weights"
    assert "rotary frequencies" in found.text
    loaded = load_drafter(str(DRAFTER), None, "bfloat16", world.target)
    assert check.check_weights(world.pair(loaded)).status == OK


def test_a_mask_token_without_an_embedding_is_named(world):
    target = copy.deepcopy(world.target)
    with torch.no_grad():
        target.get_input_embeddings().weight[3] = 0
    found = cause(world.pair(world.drafter, target))
    assert found.check == "mask token"
    assert "all zero" in found.text


def test_a_mode_that_was_not_trained_on_is_a_warning(world):
    found = check.check_encoding(world.pair(world.drafter, mode="thinking"))
    assert found.status == WARNING
    assert "trained on non-thinking texts, but the prompts are in thinking mode" in found.text


def test_a_generation_that_was_not_trained_on_is_a_warning(world):
    found = check.check_encoding(world.pair(world.drafter, generation="0731"))
    assert found.status == WARNING
    assert "trained for generation preview" in found.text
    assert "use --generation preview," in found.fix


class Elsewhere(torch.Tensor):
    """A tensor of another device, as far as its class tells: `to` brings it here."""

    def to(self, *args, **kwargs):
        return self.as_subclass(torch.Tensor).to(*args, **kwargs)


def test_prompts_and_states_are_brought_to_the_targets_device(world, monkeypatch):
    """Prompts are made on the CPU, and the last layer of a sharded target is not where its embedding is."""
    take = ResidualTap.take
    monkeypatch.setattr(ResidualTap, "take", lambda self: take(self).as_subclass(Elsewhere))
    pair = Pair(world.target, world.drafter, [world.prompts[0].as_subclass(Elsewhere)])
    assert type(pair.prompts[0]) is torch.Tensor
    text = pair.text(world.plain[0], torch.ones_like(world.plain[0]))
    assert {type(state) for state in text.states.values()} == {torch.Tensor}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: prompts are made on the CPU")
def test_a_pair_on_a_gpu_passes():
    options = ["--num-prompts", "2", "--max-new-tokens", "32", "--dtype", "float32", "--device-map", "cuda:0"]
    assert main(["check", str(TARGET), str(DRAFTER), *options]) == 0


class LatePropose(HyperDFlashModel):
    """Decoding loses the newest context, though `draft` itself is right."""

    def propose(self, request, choose):
        context = request.context[:, : max(1, request.context.shape[1] - 2)]
        super().propose(replace(request, context=context), choose)


class LateDraft(HyperDFlashModel):
    """The block of decoding is made without the newest context."""

    def draft(self, request):
        context = request.context
        return super().draft(replace(request, context=context[:, :-1] if context.shape[1] > 1 else context))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter_class", "check_name", "words"),
    [
        (LatePropose, "acceptance", "is right on these texts but decoding rejects it"),
        (LateDraft, "two paths", "other logits than training's"),
    ],
)
def test_decoding_that_is_not_what_was_trained_is_named(world, drafter_class, check_name, words):
    drafter = drafter_class.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    found = cause(world.pair(drafter))
    assert found.check == check_name
    assert words in found.text


def test_verification_that_changes_the_text_is_named(world, monkeypatch):
    monkeypatch.setattr(generation_hyperdflash, "num_leading", len)  # of the comparisons: every draft is accepted
    found = check.check_lossless(world.pair(world.drafter))
    assert found.status == FAIL
    assert "differ with the drafter" in found.text


@pytest.mark.parametrize(
    ("gaps", "status", "words"),
    [
        (
            [1e-6, None, 2e-4],
            OK,
            "(67%) differ with the drafter, each at a tie of the two tokens",
        ),
        ([1e-6, 0.5, None], FAIL, "at position 1 by logits that are 0.5 apart"),
        ([1e-6, None, math.inf], FAIL, "at position 2 where one ends"),
        ([1e-6, math.nan, 1e-6], FAIL, "at position 1 where one ends, or the logits are NaN"),
    ],
    ids=str,
)
def test_one_difference_that_is_not_a_tie_is_enough(world, monkeypatch, gaps, status, words):
    pair = world.pair(world.drafter)
    pair.plain, pair.drafted = range(3), [SimpleNamespace(sequences=None)] * 3
    differ = lambda target, plain, other: None if gaps[plain] is None else (plain, gaps[plain])  # noqa: E731
    monkeypatch.setattr(check, "first_difference", differ)
    found = check.check_lossless(pair)
    assert found.status == status
    assert words in found.text


def test_in_bf16_a_gap_is_not_sold_as_a_tie(world, monkeypatch):
    """Blocks and single tokens round differently: the share and the largest gap are said, and how to be sure."""
    pair = world.pair(world.drafter)
    pair.plain, pair.drafted = range(3), [SimpleNamespace(sequences=None)] * 3
    pair.head = SimpleNamespace(lm_head=torch.zeros(1, dtype=torch.bfloat16))
    gaps = [0.1, 0.45, None]
    differ = lambda target, plain, other: None if gaps[plain] is None else (plain, gaps[plain])  # noqa: E731
    monkeypatch.setattr(check, "first_difference", differ)
    found = check.check_lossless(pair)
    assert found.status == WARNING
    assert found.text == (
        "2 of 3 greedy outputs (67%) differ with the drafter, where the logits of the two tokens are up to 0.45 apart"
    )
    assert "--dtype float32" in found.fix


# ------------------------------------------------------------------------------------------------------ texts by heart

LENGTH, NEW_TOKENS = 8, 40


class School:
    """A random target, four texts that it wrote, and what its forward gives for them."""

    def __init__(self, **options):
        self.target = tiny_target(num_hash_layers=1, **options)
        with torch.no_grad():
            # Paths as different as training makes them: in turn, each takes a sub-layer's output, and keeps it
            for layer in self.target.model.layers:
                for i, connection in enumerate((layer.attn_hc, layer.ffn_hc)):
                    takes, keeps = 6 * torch.eye(2)[i] - 3, 6 * torch.eye(2).flatten()
                    connection.base.copy_(torch.cat([torch.zeros(2), takes, keeps]))
            # A final norm that cannot be left out, though a few texts are easy to tell apart
            self.target.model.norm.weight.copy_(torch.linspace(-1, 1, self.target.config.hidden_size))
            self.target.lm_head.weight[MASK_TOKEN_ID] = 0  # never written
        self.prompts = [random_ids(LENGTH, seed=i) for i in range(4)]
        texts = [self.target.generate(p, max_new_tokens=NEW_TOKENS, do_sample=False) for p in self.prompts]
        self.ids = torch.cat(texts)  # without an EOS they are of one length
        layers = list(range(self.target.config.num_hidden_layers))
        self.states = {}
        hooks = [
            self.target.model.layers[i].register_forward_hook(lambda m, a, out, i=i: self.states.update({i: out}))
            for i in layers
        ]
        with torch.no_grad():
            self.last_hidden_state = self.target.model(self.ids, use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        self.residual = self.states[layers[-1]]
        self.texts = {}

    def teach(self, context, *, steps=120, ids=None, offset=0, logits=None, first_slot=1, **config):
        """A drafter that learned all blocks of the texts from `context` `(4, T, m, D)`; written apart from the code
        under test. `logits` makes them from the drafter's state before and after its last norm."""
        ids = self.ids if ids is None else ids
        drafter = tiny_drafter(self.target, **{"initializer_range": 0.05, "intermediate_size": 64, **config})
        settings, T = drafter.config, ids.shape[1]
        K = settings.block_size
        anchors = torch.arange(LENGTH, T - 1).expand(len(ids), -1)
        blocks = make_blocks(ids, torch.ones_like(ids), anchors, block_size=K, mask_token_id=settings.mask_token_id)
        blocks.position_ids[:, T:] += offset
        masks = attention_masks(anchors, T, settings)
        with torch.no_grad():
            noise = self.target.model.embed_tokens(blocks.input_ids)
        head = self.target.lm_head.weight.detach()
        before = []
        hook = drafter.norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
        optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=6e-3, weight_decay=0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            before.clear()
            after = drafter(noise, context, masks, blocks.position_ids).last_hidden_state
            hidden = after if logits is None else logits(before[0], after)
            slots = hidden.view(len(ids), -1, K, hidden.shape[-1])[:, :, first_slot:][:, :, : K - 1]
            loss = F.cross_entropy((slots @ head.T).flatten(0, 2), blocks.labels[:, :, : slots.shape[2]].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        hook.remove()
        return drafter.eval()

    def pair(self, drafter, **options) -> Pair:
        pair = SharedTexts(self.target, drafter, self.prompts, max_new_tokens=NEW_TOKENS, **options)
        pair.plain, pair.texts = list(self.ids.split(1)), self.texts
        return pair


@pytest.fixture(scope="module")
def school() -> School:
    return School()


def shift(state, by):
    return state.roll(by, dims=1)


WRONG_STATES = {
    "the normed last hidden state": lambda s: s.last_hidden_state.unsqueeze(2).expand_as(s.residual),
    "the collapsed state after hc_head": lambda s: (
        s.target.model.hc_head(s.residual).detach().unsqueeze(2).expand_as(s.residual)
    ),
    "the average of the paths": lambda s: s.residual.mean(2, keepdim=True).expand_as(s.residual),
    "paths in reverse order": lambda s: s.residual.flip(2),
    "paths and channels interleaved": lambda s: s.residual.transpose(2, 3).reshape(s.residual.shape),
    "one layer early, of layer 1": lambda s: s.states[1],
    "the state of the position before": lambda s: shift(s.residual, 1),
    "the state of the position after": lambda s: shift(s.residual, -1),
}


@pytest.mark.slow
def test_a_drafter_that_learned_what_decoding_feeds_passes(school):
    findings = list(examine(school.pair(school.teach(school.residual))))
    assert [finding for finding in findings if finding.status != OK] == []
    assert findings[-1].figures["decoding"]["acceptance_length"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("words", [words if i == 0 else nightly(words) for i, words in enumerate(WRONG_STATES)])
def test_a_drafter_that_learned_from_another_state_is_told_which(school, words):
    found = cause(school.pair(school.teach(WRONG_STATES[words](school))))
    assert found.status == FAIL
    assert words in found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "logits"),
    [
        ("with the target's final norm after its own", lambda norm: lambda before, after: norm(after)),
        nightly("with the target's final norm instead of its own", lambda norm: lambda before, after: norm(before)),
    ],
)
def test_a_drafter_that_learned_with_another_norm_is_told_which(school, words, logits):
    found = cause(school.pair(school.teach(school.residual, logits=logits(school.target.model.norm))))
    assert found.check == "norm and head"
    assert words in found.text


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "words"), [(1, "one position too late"), nightly(-1, "one position too early")])
def test_a_drafter_that_learned_at_other_positions_is_told_so(school, offset, words):
    found = cause(school.pair(school.teach(school.residual, offset=offset)))
    assert found.check == "rotary positions"
    assert words in found.text


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "words"), [(0, "the token after its own"), nightly(2, "the token before its own")])
def test_a_drafter_whose_slots_learned_another_token_is_told_so(school, slot, words):
    found = cause(school.pair(school.teach(school.residual, first_slot=slot)))
    assert found.status == FAIL
    assert words in found.text


@pytest.mark.slow
def test_tapped_layers_one_off_are_named(school):
    """Trained on layers 0 and 1, but the config says 1 and 2."""
    context = torch.cat([school.states[0], school.states[1]], dim=-1)
    drafter = school.teach(context, context_source="hidden_layers", target_layer_ids=[0, 1])
    drafter.config.target_layer_ids = [1, 2]
    found = cause(school.pair(drafter))
    assert found.check == "tapped state"
    assert found.fix == "set target_layer_ids to [0, 1]"


@pytest.mark.slow
def test_the_final_residual_configured_as_tapped_layers_is_named(school):
    """Both have the shape of the dense projection."""
    drafter = school.teach(school.residual, reducer="fc")
    drafter.config.context_source, drafter.config.target_layer_ids = "hidden_layers", [0, 1]
    drafter.reducer.average_paths = True
    found = cause(school.pair(drafter))
    assert found.check == "tapped state"
    assert found.fix == "set context_source to 'pre_hc_head' and target_layer_ids to [2]"


@pytest.mark.slow
def test_tapped_layers_configured_as_the_final_residual_are_named():
    school = School(layer_types=[SLIDING] * 5)
    context = torch.cat([school.states[1], school.states[2]], dim=-1)
    drafter = school.teach(context, context_source="hidden_layers", target_layer_ids=[1, 2])
    drafter.config.context_source, drafter.config.target_layer_ids = "pre_hc_head", [4]
    drafter.reducer.average_paths = False
    found = cause(school.pair(drafter))
    assert found.check == "tapped state"
    assert found.fix == "set context_source to 'hidden_layers' and target_layer_ids to [1, 2]"


@pytest.mark.slow
def test_data_that_the_target_did_not_write_is_named(school):
    """The drafter knows the given answers by heart; the target answers the same prompts otherwise."""
    given = torch.cat([torch.cat([p, random_ids(NEW_TOKENS, seed=50 + i)], 1) for i, p in enumerate(school.prompts)])
    with ResidualTap(school.target) as tap, torch.no_grad():
        school.target.model(given, use_cache=False)
        residual = tap.take()
    drafter = school.teach(residual, ids=given)
    mask = [0] * LENGTH + [1] * NEW_TOKENS
    found = cause(school.pair(drafter, given=[(ids.tolist(), mask) for ids in given]))
    assert found.check == "acceptance"
    assert "was not written by this target" in found.text
    assert "data regenerate" in found.fix
    without = cause(school.pair(drafter))
    assert "poor on the target's own texts" in without.text


# --------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3}, "unexpected keys: layers.3."),
        ({"intermediate_size": 256}, "mismatched keys"),
        ({"reducer_path_norm": False}, "unexpected keys: reducer.path_norm"),
        ({"context_source": "hidden_layers"}, "reducer 'hc_gate' needs context_source 'pre_hc_head'"),
    ],
    ids=str,
)
def test_a_drafter_that_cannot_be_loaded_is_the_cause(tmp_path, capsys, changes, words):
    folder = copied_drafter(tmp_path / "drafter", **changes)
    assert main(["check", str(TARGET), str(folder), "--json"]) == CAUSE_FOUND
    result = json.loads(capsys.readouterr().out)
    assert words in result["cause"]
    assert result["findings"][-1]["check"] == "loading"


def test_the_generation_of_the_prompts_can_be_chosen_and_is_the_drafters_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(
        check, "encode_chats", lambda chats, tokenizer, encoding, limit: seen.append(encoding) or 1 / 0
    )
    for options in ([], ["--generation", "0731"]):
        with pytest.raises(ZeroDivisionError):
            main(["check", str(TARGET), str(DRAFTER), *options])
    assert [encoding["generation"] for encoding in seen] == ["preview", "0731"]


def test_the_pair_is_judged_by_the_generation_that_was_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(check, "examine", lambda pair: seen.append(pair.generation) or [])
    main(["check", str(TARGET), str(DRAFTER), "--generation", "0731"])
    assert seen == ["0731"]


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_revision_of_a_folder_is_wrong_usage_and_not_a_cause(capsys, monkeypatch, role):
    monkeypatch.setattr(check, "load_target_model", lambda *args: pytest.fail("loaded"))
    assert main(["check", str(TARGET), str(DRAFTER), f"--{role}-revision", "main"]) == 2 != CAUSE_FOUND
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "revision='main' belongs to a Hub id" in captured.err


def test_a_prompt_that_is_too_long_is_said_before_the_target_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(check, "load_target_model", lambda *args: pytest.fail("loaded"))
    assert main(["check", str(TARGET), str(DRAFTER), "--max-new-tokens", "3000"]) == 1
    assert "prompt 1 has 28 tokens" in capsys.readouterr().err


def test_the_cause_is_named_at_the_end_and_as_json(tmp_path, capsys):
    folder = copied_drafter(tmp_path / "drafter", vocab_size=4000)
    assert main(["check", str(TARGET), str(folder)]) == CAUSE_FOUND
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1].startswith("Cause: this drafter was made for a target with vocabulary 4000")
    assert [line.split()[0] for line in lines[:-2]] == ["ok", "FAIL"]
    assert main(["check", str(TARGET), str(folder), "--json"]) == CAUSE_FOUND
    result = json.loads(capsys.readouterr().out)
    assert [finding["status"] for finding in result["findings"]] == ["ok", "FAIL"]
    assert "hyperdflash init" in result["findings"][1]["fix"]


def test_warnings_alone_are_not_a_failure(monkeypatch, capsys):
    found = [check.Finding("encoding", WARNING, "another mode [thinking]", "use --mode thinking")]
    monkeypatch.setattr(check, "find", lambda args, chats: found)
    assert main(["check", str(TARGET), str(DRAFTER)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "warning encoding          another mode [thinking]: use --mode thinking",
        "",
        "No cause found, but see the warnings.",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--num-prompts", "0"], 2, "--num-prompts must be at least 1, got 0"),
        (["--max-new-tokens", "0"], 2, "--max-new-tokens must be at least 1, got 0"),
        (["--threads", "0"], 2, "--threads must be at least 1, got 0"),
        (["--threads", "-1"], 2, "--threads must be at least 1, got -1"),
        (["--effort", "high"], 2, "--effort high is for thinking mode: add --mode thinking"),
        (["--mode", "thinking", "--effort", "huge"], 2, "unknown effort 'huge'"),
        (["--prompts", "nowhere.jsonl"], 1, "no data file nowhere.jsonl"),
        (["--max-new-tokens", "3000"], 1, "prompt 1 has 28 tokens"),
        (["--max-new-tokens", "2", "--num-prompts", "1"], 1, "the target wrote only 1 tokens to judge by"),
    ],
    ids=str,
)
def test_what_cannot_be_checked_is_said_in_one_line(capsys, arguments, status, words):
    """With another exit status than that of a cause."""
    assert main(["check", str(TARGET), str(DRAFTER), *arguments]) == status != CAUSE_FOUND
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hyperdflash check: ")
    assert words in error


@pytest.mark.parametrize(
    ("target", "drafter", "status", "words"),
    [
        (DRAFTER, TARGET, 2, "drafter-paper is the drafter and"),
        (DRAFTER, DRAFTER, 2, "drafter-paper is not a target: its model_type is 'hyperdflash', not 'deepseek_v4'"),
        (TARGET, TARGET, 2, "target is not a drafter: its model_type is 'deepseek_v4', not 'hyperdflash'"),
        ("./nowhere", DRAFTER, 1, "no folder ./nowhere"),
        (TARGET, "./nowhere", 1, "no folder ./nowhere"),
        (TARGET, TARGET.parent, 2, "tiny is not a drafter: it has no config.json with a model_type"),
    ],
    ids=str,
)
def test_a_missing_or_swapped_folder_is_not_a_cause(capsys, monkeypatch, target, drafter, status, words):
    monkeypatch.setattr(check, "load_target_model", lambda *args: pytest.fail("loaded"))
    assert main(["check", str(target), str(drafter)]) == status != CAUSE_FOUND
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hyperdflash check: ")
    assert words in captured.err


def test_prompts_are_those_of_a_benchmark_and_answers_come_with_them(tmp_path):
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    last = {"role": "user", "content": "last"}
    rows = [
        {"prompt": "one"},
        {"turns": ["two", "more"]},
        {"messages": [question, answer, last]},
        {"messages": [question, answer, last, answer]},
        {"instruction": "Add.", "output": "4"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = check.read_chats(str(path), 10)
    assert [[message["content"] for message in chat] for chat, _ in chats] == [
        ["one"],
        ["two"],
        ["q", "a", "last"],
        ["q", "a", "last"],
        ["Add."],
    ]
    assert [[message["content"] for message in answers] for _, answers in chats] == [[], [], [], ["a"], ["4"]]
    asked = [[*prompt.history, {"role": "user", "content": prompt.turns[0]}] for prompt in read_file(path).prompts]
    assert [chat for chat, _ in chats] == asked
    assert len(check.read_chats(str(path), 2)) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user message"),
        ({"turns": [" "]}, "must be a list of texts"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
    ],
    ids=str,
)
def test_a_row_without_a_prompt_is_named_before_the_target_is_loaded(tmp_path, row, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"prompts.jsonl:1 is not a prompt: .*{words}"):
        check.read_chats(str(path), 1)
