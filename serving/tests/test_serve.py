"""A real `vllm serve` on the CPU: `hyperdflash data regenerate --server` against it, and a drafter in it.

What answers `regenerate`, which runs in the main environment, is a random Qwen3 made here with the tiny target's
tokenizer. The drafter is served beside the random DeepSeek-V4 of `make_tiny.py`, with the CPU's shim.
"""

import json
import shutil
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm_server import START, VLLM, byte_tokenizer, serve, stop

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOKENIZER = ROOT / "examples" / "tiny" / "target"
EOS, NEW_TOKENS, MAX_LENGTH = 1, 24, 256


def random_qwen3(folder: Path) -> None:
    """A Qwen3 that ends some of its answers: the logit of EOS varies more than the others'."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 2.5
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # vLLM's own configuration refuses the target's folder
        shutil.copy(TOKENIZER / name, folder)


# ------------------------------------------------------------------------------------------------------------ servers


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    random_qwen3(folder)
    return folder


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    """A running `vllm serve`, stopped in the end whatever happens."""
    arguments = [model, "--dtype", "float32", "--max-model-len", MAX_LENGTH, "--max-num-batched-tokens", 512]
    process, url = serve([*arguments, "--enforce-eager"], tmp_path_factory.mktemp("server") / "log.txt")
    yield url
    stop(process)


def ask(url: str, prompt: list[int], **more) -> list[int]:
    """The server's greedy answer to one request."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=START) as response:
        (choice,) = json.load(response)["choices"]
    return choice["token_ids"]


# ------------------------------------------------------------------------------------------------ answers written anew


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Twelve conversations: one of two turns, one in thinking mode, and a prompt that the server has no room for."""
    lines = (ROOT / "examples" / "tiny" / "chats.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:12]]
    rows[1]["messages"] += [{"role": "assistant", "content": "old"}, {"role": "user", "content": "And the other?"}]
    rows[2]["mode"] = "thinking"
    rows[3]["messages"][0]["content"] *= 60
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def command(main_python, url, chats):
    """A function of an output and further options, which returns the words of the command."""

    def words(output: Path, *options) -> list[str]:
        ours = ["-m", "hyperdflash", "data", "regenerate", chats, "--output", output, "--tokenizer", TOKENIZER]
        there = ["--server", url, "--model", "tiny", "--max-new-tokens", NEW_TOKENS]
        return [main_python, *map(str, [*ours, *there, *options])]

    return words


def run(words: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def read(file: Path) -> dict[str, dict]:
    """The rows of an output by their source."""
    return {row["source"]: row for row in map(json.loads, file.read_text().splitlines())}


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> Path:
    """The answers of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    done = run(command(output))
    assert done.returncode == 0, done.stderr
    return output


def split(row: dict) -> tuple[list[int], list[int]]:
    """What was asked and what was answered."""
    asked = row["loss_mask"].index(1)
    return row["input_ids"][:asked], row["input_ids"][asked:]


def test_every_turn_has_an_answer_and_the_one_without_room_a_reason(whole):
    rows = read(whole)
    turns = {f"{number}#1" for number in range(1, 13) if number != 4} | {"2#2"}
    assert {source.rpartition(":")[2] for source in rows} == turns
    (failed,) = map(json.loads, whole.with_suffix(".failed.jsonl").read_text().splitlines())
    assert failed["source"].endswith(":4#1")
    assert "HTTP 400" in failed["reason"]
    assert {row["token_ids"] for row in rows.values()} == {"exact"}
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}
    assert [row["mode"] for source, row in rows.items() if source.endswith(":3#1")] == ["thinking"]


def test_answers_are_the_models_own_greedy_ids(whole, model, url):
    """As a request of one's own gets them, and as transformers decodes them."""
    reference = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in read(whole).values():
        prompt, answer = split(row)
        assert ask(url, prompt, max_tokens=NEW_TOKENS) == answer
        ids = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert ids[0, len(prompt) :].tolist() == answer
        assert (answer[-1] == EOS) == (row["finish_reason"] == "stop")


def test_a_second_turn_is_asked_after_the_new_first_answer(whole):
    rows = {source.rpartition(":")[2]: row for source, row in read(whole).items()}
    if rows["2#1"]["finish_reason"] == "length":
        pytest.fail("the first answer was cut, so the second turn was not asked: choose another seed")
    assert rows["2#2"]["messages"][:2] == rows["2#1"]["messages"]
    first = rows["2#1"]["input_ids"]
    assert rows["2#2"]["input_ids"][: len(first)] == first


@pytest.mark.parametrize("options", [(), ("--temperature", "1", "--top-p", "0.9")], ids=["greedy", "sampled"])
def test_a_killed_run_goes_on_to_the_rows_of_an_uninterrupted_one(command, whole, tmp_path, options):
    """One request at a time against 32 at once: an answer depends on nothing else that is being written."""
    if options:
        whole = tmp_path / "whole.jsonl"
        assert run(command(whole, *options)).returncode == 0
    output = tmp_path / "answers.jsonl"
    process = subprocess.Popen(command(output, "--concurrency", "1", *options), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and not (output.exists() and output.read_bytes().count(b"\n") >= 3):
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert 3 <= output.read_bytes().count(b"\n") < 12
    done = run(command(output, *options))
    assert done.returncode == 0, done.stderr
    assert "were there before" in done.stdout
    assert read(output) == read(whole)


def test_a_name_that_the_server_has_no_model_for_is_refused_with_those_it_has(command, tmp_path):
    done = run(command(tmp_path / "answers.jsonl", "--model", "other"))
    assert done.returncode == 1
    assert "does not serve 'other'; it serves tiny" in done.stderr
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- a drafter, served


@pytest.fixture(scope="module")
def tokenizer(build, tmp_path_factory) -> list:
    """Options that server and benchmark have in common."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(folder, build / "sliding" / "target")
    return ["--tokenizer", folder, "--tokenizer-mode", "hf"]


@pytest.fixture(scope="module")
def drafting_url(v4, build, tokenizer, tmp_path_factory):
    """`vllm serve` of a DeepSeek-V4 with a drafter whose sequential head is mostly right; engine and worker are
    processes of their own."""
    speculative = {
        "method": "dflash",
        "model": str(build / "sliding" / "chain" / "served"),
        "num_speculative_tokens": 3,
        "kv_cache_dtype": "bfloat16",
    }
    arguments = [build / "sliding" / "target", *tokenizer, "--speculative-config", json.dumps(speculative)]
    arguments += ["--enforce-eager", "--max-model-len", 512, "--max-num-batched-tokens", 512, "--max-num-seqs", 4]
    process, url = serve(arguments, tmp_path_factory.mktemp("drafting") / "log.txt", WITH_SHIM="1")
    yield url
    stop(process)


def test_a_server_with_a_drafter_answers_with_the_tokens_of_plain_decoding(drafting_url, engine):
    """Plain decoding being an engine's without a server."""
    prompts = [torch.arange(length).mul(7).remainder(318).tolist() for length in (58, 5, 120, 30)]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda ids: ask(drafting_url, ids, max_tokens=80, ignore_eos=True), prompts)
        assert list(answers) == engine(batches=[prompts])["tokens"][0]


def test_the_benchmark_of_vllm_reports_tau(drafting_url, tokenizer, tmp_path):
    """As `docs/serving.md` says."""
    texts = [{"prompt": text} for text in ("one, two, three, ", "a b c d e f ")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    words = ["bench", "serve", "--backend", "openai", "--base-url", drafting_url, "--model", "tiny", *tokenizer[:2]]
    words += ["--tokenizer-mode", "deepseek_v4", "--chat-template-kwargs", '{"thinking": false}', "--disable-shuffle"]
    words += ["--dataset-name", "custom", "--dataset-path", tmp_path / "prompts.jsonl", "--num-prompts", 2]
    words += ["--custom-output-len", 64, "--temperature", 0, "--ignore-eos"]
    words += ["--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"]
    done = run([*VLLM, *map(str, words)])
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (2, 128)
    drafts, accepted = result["spec_decode_num_drafts"], result["spec_decode_accepted_tokens"]
    assert 0 < drafts < 128
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert accepted > drafts
    assert f"Acceptance length:                       {1 + accepted / drafts:.2f}" in done.stdout
