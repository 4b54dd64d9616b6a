"""The tiny target and drafters that the repository carries: real, small, and drafting."""

import ast
import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyperdflash.__main__ import main
from hyperdflash.encoding_deepseek_v4 import encode_with_mask
from hyperdflash.generation.demo import PROMPTS, TINY
from hyperdflash.generation.mtp import load_mtp
from hyperdflash.generation_hyperdflash import SpeculativeStats
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.blocks import attention_masks, make_blocks, previous_ids
from hyperdflash.training.target import OnlineFeatures

TARGET, DRAFTER, PAPER = TINY / "target", TINY / "drafter", TINY / "drafter-paper"


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=[DRAFTER, PAPER], ids=lambda folder: folder.name)
def drafter(request):
    return HyperDFlashModel.from_pretrained(request.param, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def answers(target, drafter, tokenizer):
    """Per domain: prompt length, plain output, drafted output."""
    found = {}
    for domain, prompt in PROMPTS.items():
        ids, _ = encode_with_mask([{"role": "user", "content": prompt}], tokenizer, add_generation_prompt=True)
        options = {"do_sample": False, "max_new_tokens": 128, "return_dict_in_generate": True}
        prompt_ids = torch.tensor([ids])
        plain = target.generate(prompt_ids, **options)
        found[domain] = len(ids), plain, target.generate(prompt_ids, assistant_model=drafter, **options)
    return found


@pytest.mark.slow
@torch.no_grad()
def test_every_round_of_decoding_accepts_what_the_blocks_of_training_predict(target, drafter, answers):
    """The trained drafter, real texts: the slots that a training block gets right in front are the round's accepted
    drafts, round by round; what is learned is what is decoded.

    https://github.com/sgl-project/SpecForge/issues/455
    """
    features = OnlineFeatures(target, drafter.config)
    K, num_rounds = drafter.config.block_size, 0
    for prompt_length, _, drafted in answers.values():
        ids = drafted.sequences
        anchors = torch.arange(prompt_length, ids.shape[1] - 1)[None]
        blocks = make_blocks(
            ids, torch.ones_like(ids), anchors, block_size=K, mask_token_id=drafter.config.mask_token_id
        )
        has_head = drafter.markov_head is not None
        out = drafter(
            features.head.embed(blocks.input_ids),
            features({"input_ids": ids}).context_hidden_states,
            attention_masks(anchors, ids.shape[1], drafter.config),
            blocks.position_ids,
            previous_ids=previous_ids(blocks) if has_head else None,
        )
        logits = out.last_hidden_state @ features.head.lm_head.T
        if has_head:
            logits = logits + out.markov_states @ drafter.markov_head.markov_w2.T
        drafts = logits.view(-1, K, logits.shape[-1])[:, 1:].argmax(-1)
        right = (drafts == blocks.labels[0]).long().cumprod(-1).sum(-1)
        position, expected, drafted_lengths = prompt_length, [], iter(drafted.speculation.num_drafts)
        while position < ids.shape[1] - 1:
            expected.append(min(int(right[position - prompt_length]), next(drafted_lengths, 0)))
            position += expected[-1] + 1
        assert drafted.speculation.num_accepted[: len(expected) - 1] == expected[:-1]  # the last one may be cut
        num_rounds += len(expected) - 1
    assert num_rounds > 10


def test_target_has_every_part_of_a_v4(target):
    config = target.config
    assert set(config.layer_types) == {
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    }
    assert set(config.mlp_layer_types) == {"hash_moe", "moe"}
    assert config.hc_mult == 4
    assert config.hidden_size >= 192
    assert config.num_hidden_layers >= 6
    assert config.max_position_embeddings >= 2048
    assert config.vocab_size == 4096
    assert target.generation_config.use_cache
    for layer in target.model.layers:
        if layer.mlp.is_hash:
            assert layer.mlp.gate.tid2eid.unique().numel() == config.n_routed_experts


def test_weights_are_small_bf16_safetensors():
    for folder, limit in ((TARGET, 12e6), (DRAFTER, 5e6), (PAPER, 4e6)):
        files = list(folder.glob("*.safetensors"))
        assert sum(file.stat().st_size for file in files) <= limit
        assert not list(folder.glob("*.bin")) + list(folder.glob("*.pt"))
        with safe_open(files[0], framework="pt") as file:
            dtypes = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
            gate = [file.get_slice(name).get_dtype() for name in file.keys() if "reducer" in name]  # noqa: SIM118
        assert dtypes.count("BF16") > len(dtypes) / 2
        assert set(gate) <= {"F32"}  # inherited without rounding


def test_held_out_perplexity_is_recorded_and_shows_learning():
    report = json.loads((TARGET / "target_report.json").read_text())
    for domain in ("code", "math", "chat"):
        assert report[domain]["perplexity"] < 40  # an untrained model of this vocabulary has 4,096


def test_greedy_text_is_code_worked_arithmetic_and_dialogue(answers, tokenizer):
    text = {d: tokenizer.decode(out.sequences[0, n:], skip_special_tokens=True) for d, (n, out, _) in answers.items()}
    ast.parse(text["code"])
    assert text["code"].startswith("def ")
    assert "#### " in text["math"]
    assert len(text["chat"].split()) >= 4


def test_drafted_ids_are_the_plain_ids(answers):
    for domain, (_, plain, drafted) in answers.items():
        assert drafted.sequences.tolist() == plain.sequences.tolist(), domain


def test_drafter_drafts(answers):
    stats = SpeculativeStats()
    for _, _, drafted in answers.values():
        stats.extend(drafted.speculation)
    assert stats.acceptance_length > 2


@torch.no_grad()
def test_native_mtp_module_predicts_the_token_after_the_next(answers, target):
    """Loaded from `mtp.0.*` of the target's checkpoint, on the target's own text."""
    mtp = load_mtp(TARGET, target.config)
    correct = total = 0
    for prompt_length, plain, _ in answers.values():
        ids = plain.sequences
        with ResidualTap(target, HyperDFlashModel.from_pretrained(DRAFTER).config.tapped_layer_ids) as tap:
            target(ids, use_cache=False)
            residual = tap.take()
        hidden, fed_back = mtp(target.model.embed_tokens(ids[:, 1:-1]), residual[:, :-2], ids[:, 1:-1])
        assert fed_back.shape == residual[:, :-2].shape
        right = target.lm_head(hidden)[0].argmax(-1) == ids[0, 2:]
        correct += int(right[prompt_length:].sum())
        total += len(right[prompt_length:])
    assert correct / total > 0.4


def test_tokenizer_round_trip_is_exact(tokenizer):
    text = 'def f(x):\n    """Doc: é ü 中文 🙂"""\n\treturn  {"a": [1, 2345]}  \n\n'
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.slow
def test_demo_ends_with_its_table(capsys):
    assert main(["demo", "--repeats", "1", "--max-new-tokens", "32"]) == 0
    out = capsys.readouterr().out
    assert "same ids" in out.replace("\n", " ")
    assert sum("yes" in line and "x" in line for line in out.splitlines() if "│" in line) == 3
    assert "acceptance by position" in out


def test_a_wheel_has_what_the_demo_loads_and_the_recipes():
    """Every file of the pair but those that only the Hub and a reader need."""
    root = Path(__file__).parents[1]
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {path for pattern in setuptools["package-data"]["hyperdflash"] for path in root.glob(pattern)}
    for folder in (TARGET, DRAFTER):
        weights_and_json = {path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
        assert {"config.json", "model.safetensors"} <= {path.name for path in weights_and_json}
        assert weights_and_json <= packed
    assert set((root / "training" / "recipes").glob("*.yaml")) <= packed


def test_examples_in_the_readme_exist():
    root = Path(__file__).parents[1]
    readme = (root / "README.md").read_text()
    for path in ("examples/tiny/target", "examples/tiny/drafter", "examples/tiny/drafter-paper"):
        assert path in readme
        assert (root / path / "config.json").exists()
    assert 'revision="<commit>"' in readme  # a pinned revision: huggingface/transformers pull 23799
