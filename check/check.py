"""`hyperdflash check TARGET DRAFTER`: why does a drafter that trained well accept nothing?

    hyperdflash check examples/tiny/target examples/tiny/drafter --threads 1  # half a minute on a CPU
    hyperdflash check TARGET DRAFTER --prompts train.jsonl --json             # also looks at given answers
    hyperdflash check TARGET mtp             # or dspark: the drafter in the target's own checkpoint, by decoding alone

Goes through the known causes, one line each. A cause may hide those after it, so the first FAIL is the one to fix.
Most are found by experiments on texts that the target itself writes (`experiments.py`). Exit status 0 if nothing worse
than a warning was found, 3 if a cause was found, 1 after an error and 2 for wrong usage.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.markup import escape
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..benchmark.prompt_sets import history_and_turns
from ..common.checkpoint import (
    TargetCheckpoint,
    check_device_map,
    check_target,
    encoding_mismatch,
    load_drafter,
    load_target_model,
    load_tokenizer,
    resolve_checkpoint,
)
from ..common.console import UsageError
from ..common.data_files import read_rows
from ..common.options import OWN_DRAFTERS
from ..configuration_hyperdflash import HyperDFlashConfig
from ..encoding_deepseek_v4 import check_options, encode_messages, encode_with_mask
from ..generation.comparison import TIE_GAPS, first_difference
from ..generation.demo import PROMPTS
from ..generation.own_drafter import find_own_drafter, load_native
from ..generation_hyperdflash import DraftRequest, SpeculativeStats
from ..pairing_hyperdflash import check_pair, check_shapes, compare_fingerprint
from .experiments import MASK, MIN_BLOCKS, MIN_GAIN, OUTPUT, POSITIONS, SETTINGS, STATE, Pair

BUILT_IN_PROMPTS = (
    *PROMPTS.values(),
    "Write a Python function `count_words(text)`: Return how often each word occurs in text.",
    "A box holds 12 pencils. How many pencils are in 7 boxes?",
    "I want to book a table for two at an Italian restaurant in the centre.",
)
OK, WARNING, FAIL = "ok", "warning", "FAIL"
CAUSE_FOUND = 3  # exit status; 1 and 2 mean that the command could not run
STYLES = {OK: "green", WARNING: "yellow", FAIL: "bold red"}
POOR = 0.5  # accepted drafts per round below which a drafter is useless
ALIKE = 0.95  # trials with this share of the best gain in cross-entropy cannot be told apart from the best
NOT_TRAINED = "train it (`hyperdflash train`), or export the checkpoint that was trained"


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        check (`str`): its name.
        status (`str`): `OK`, `WARNING` or `FAIL`.
        text (`str`): what was found.
        fix (`str`): what to do about it, or empty.
        is_last (`bool`): the checks after it cannot run.
        figures (`dict`): for --json; `accepted_drafts` are per block or round.
    """

    check: str
    status: str
    text: str
    fix: str = ""
    is_last: bool = False
    figures: dict = {}

    def sentence(self) -> str:
        return f"{self.text}: {self.fix}" if self.fix else self.text


# -------------------------------------------------------------------------------------------------------------- checks


def check_finite(pair: Pair) -> Finding:
    """All weights are finite."""
    bad = [name for name, tensor in pair.drafter.named_parameters() if not tensor.isfinite().all()]
    if bad:
        fix = "the training diverged or the file is damaged; take an earlier checkpoint"
        return Finding("weights", FAIL, f"{', '.join(bad[:5])} hold NaN or infinite values", fix, is_last=True)
    return Finding("weights", OK, f"{pair.drafter.num_parameters():,} parameters, all finite")


def check_weights(pair: Pair) -> Finding:
    """All weights are finite, and the rotary frequencies are in fp32."""
    finite = check_finite(pair)
    if finite.status == FAIL:
        return finite
    wanted = Qwen3RotaryEmbedding(pair.config).inv_freq
    found = pair.drafter.rotary_emb.inv_freq
    if not torch.allclose(found.float().cpu(), wanted.float(), rtol=1e-4, atol=0):
        fix = "load it with from_pretrained(dtype=...) instead of casting it, which leaves them in fp32"
        return Finding("weights", FAIL, f"the rotary frequencies are not exact ({found.dtype})", fix)
    return Finding("weights", OK, f"{finite.text}; rotary frequencies in fp32")


def check_trained(pair: Pair) -> Finding:
    """No layer still has its initial values."""
    untrained = [i for i, layer in enumerate(pair.drafter.layers) if is_untrained(layer, pair.config)]
    if len(untrained) == pair.config.num_hidden_layers:
        text = "the drafter has not been trained: all its layers have their initial values"
        return Finding("training", FAIL, text, NOT_TRAINED)
    if untrained:
        names = ", ".join(map(str, untrained))
        return Finding("training", FAIL, f"layers {names} have never been trained", NOT_TRAINED)
    text = "no layer has its initial values"
    if pair.config.reducer == "hc_gate":
        own, theirs = (x.detach().float() for x in (pair.drafter.reducer.hc_fn, pair.head.hc_head.hc_fn))
        text += f"; the gate moved by {float((own - theirs).norm() / theirs.norm()):.0%} of the target's hc_head"
    return Finding("training", OK, text)


def is_untrained(layer: nn.Module, config) -> bool:
    """All norm weights are one, and every matrix has the standard deviation of its initialisation."""
    for module in layer.modules():
        if isinstance(module, Qwen3RMSNorm) and not (module.weight == 1).all():
            return False
        if isinstance(module, nn.Linear):
            weight = module.weight.detach().float()
            # Four standard errors of a standard deviation, at least 2%
            tolerance = max(0.02, 4 / (2 * weight.numel()) ** 0.5)
            if abs(float(weight.std()) / config.initializer_range - 1) > tolerance:
                return False
    return True


def check_mask(pair: Pair) -> Finding:
    """The mask token is a valid one. (An experiment finds out whether it is the one used in training.)"""
    token, rows = pair.config.mask_token_id, pair.head.embedding
    fix = "set mask_token_id to the token it was trained with"
    try:
        check_pair(pair.drafter, pair.target)
    except ValueError as error:
        return Finding(MASK, FAIL, str(error).partition(":")[0], fix, is_last=True)
    if not rows[token].any():
        text = f"the target's embedding row of mask_token_id {token} is all zero"
        return Finding(MASK, FAIL, text, "choose a token with an embedding and train again")
    if any((text.ids == token).any() for text in pair.own):
        return Finding(MASK, WARNING, f"mask_token_id {token} is a token of the target's texts", fix)
    if pair.special_ids and token not in pair.special_ids.values():
        return Finding(MASK, WARNING, f"mask_token_id {token} is an ordinary token, which a text may contain", fix)
    return Finding(MASK, OK, f"mask_token_id {token} has an embedding, and no text contains it")


def check_encoding(pair: Pair) -> Finding:
    """The drafter was trained on the mode and generation of the prompts."""
    trained = pair.config.encoding or {}
    modes, generation = trained.get("modes"), trained.get("generation")
    if not modes:
        return Finding("encoding", OK, "the config does not say which modes it was trained on")
    if text := encoding_mismatch(pair.config, pair.mode, pair.generation):
        options = [f"--mode {modes[0]}"] if pair.mode not in modes else []
        if generation not in (None, pair.generation):
            options.append(f"--generation {generation}")
        fix = f"use {' '.join(options)}, or train on such texts as the prompts"
        return Finding("encoding", WARNING, f"the drafter {text}", fix)
    return Finding("encoding", OK, f"trained on {pair.mode} texts, as asked for")


def check_fingerprint(pair: Pair) -> Finding:
    """The target has the weights that the drafter was made for; others are a cause only if it accepts little."""
    name = pair.config.target_name_or_path or "another target"
    if pair.config.target_fingerprint is None:
        return Finding("fingerprint", OK, "the config has none, so the target's weights are not compared")
    if not (lines := compare_fingerprint(pair.config.target_fingerprint, pair.target)):
        return Finding("fingerprint", OK, f"the target has the weights of {name}")
    text = f"the drafter was made for other weights than this target's ({name}): {'; '.join(lines)}"
    # By training's blocks: decoding may have a fault of its own
    if predicted_rounds(pair).accepted_drafts < POOR:
        return Finding("fingerprint", FAIL, text, "use that target, or train this drafter on answers of this one")
    return Finding("fingerprint", WARNING, f"{text}; it accepts enough nevertheless")


@torch.no_grad()
def check_two_paths(pair: Pair) -> Finding:
    """Training and decoding give the same logits at some anchors of one text, both in fp32."""
    text = max(pair.own, key=lambda text: text.anchors.shape[1])
    anchors = text.anchors[:, :: max(1, text.anchors.shape[1] // 8)]
    hidden, blocks = pair.hidden(text, anchors)
    lm_head, device = pair.head.lm_head, pair.target.device
    trained = F.linear(hidden[:, 1:].to(lm_head.dtype), lm_head).float()
    context, noise = pair.configured_state(text.states), blocks.input_ids.view(anchors.shape[1], -1).to(device)
    cache, start, worst, where = DynamicCache(config=pair.config), 0, 0.0, 0
    for i, anchor in enumerate(anchors[0].tolist()):
        request = DraftRequest(
            context=context[:, start:anchor],
            ids=text.ids[:, : anchor + 1],
            noise_ids=noise[i : i + 1],
            position=anchor,
            num_drafts=noise.shape[1] - 1,
            target=pair.target,
            cache=cache,
        )
        drafted = pair.model.draft(request)
        difference = float((drafted.float() - trained[i]).abs().max())
        worst, where, start = max((worst, where), (difference, anchor)) + (anchor,)
    # The LM head runs in the target's dtype, the drafter in fp32
    rounding = (1e-3 if lm_head.dtype == torch.float32 else 0.05) * float(trained.abs().max())
    if not worst <= rounding:
        text = f"decoding's block has other logits than training's, by up to {worst:.3g} (at position {where})"
        return Finding("two paths", FAIL, text, "decoding feeds it another context, mask or positions: fix `draft`")
    return Finding("two paths", OK, f"training and decoding agree on the logits to {worst:.1e}, rounding")


def check_lossless(pair: Pair) -> Finding:
    """Greedy output with the drafter is plain greedy output, up to ties of the two tokens."""
    pairs = zip(pair.plain, pair.drafted, strict=True)
    found = (first_difference(pair.target, plain, drafted.sequences) for plain, drafted in pairs)
    differences = [difference for difference in found if difference is not None]
    if not differences:
        return Finding("lossless", OK, f"the same {len(pair.plain)} greedy outputs with and without the drafter")
    number = f"{len(differences)} of {len(pair.plain)} greedy outputs ({len(differences) / len(pair.plain):.0%})"
    text, dtype = f"{number} differ with the drafter", pair.head.lm_head.dtype
    tie = TIE_GAPS[dtype]
    wrong = [difference for difference in differences if not difference[1] <= tie]  # also for NaN
    if not wrong:
        gap = max(gap for _, gap in differences)
        if gap <= TIE_GAPS[torch.float32]:
            return Finding("lossless", OK, f"{text}, each at a tie of the two tokens (logits {gap:.1e} apart)")
        text += f", where the logits of the two tokens are up to {gap:.2g} apart"
        fix = f"rounding in {str(dtype).removeprefix('torch.')} can explain it; with --dtype float32 a fault shows"
        return Finding("lossless", WARNING, text, fix)
    position, gap = wrong[0]
    why = f"by logits that are {gap:.2g} apart" if math.isfinite(gap) else "where one ends, or the logits are NaN"
    fix = "report it: verification is wrong for this target"
    return Finding("lossless", FAIL, f"{text}, at position {position} {why}", fix)


def check_acceptance(pair: Pair) -> Finding:
    """Real decoding against training's blocks on the same texts, and against given answers."""
    decoded, predicted = decoded_rounds(pair), predicted_rounds(pair)
    got, expected = decoded.accepted_drafts, predicted.accepted_drafts
    rates = by_position(decoded.per_position_acceptance_rates)
    text = f"tau {1 + got:.2f} in decoding{rates}, {1 + expected:.2f} predicted from training blocks"
    figures = {"decoding": decoded.to_dict(), "training": predicted.to_dict()}

    def found(status, *sentence):
        return Finding("acceptance", status, *sentence, figures=figures)

    if got < expected / 2 and expected - got > MIN_GAIN:
        fix = "cache, positions or mask of decoding differ from training's"
        return found(FAIL, f"the drafter is right on these texts but decoding rejects it: {text}", fix)
    if foreign := foreign_data(pair):
        return found(
            FAIL, f"{foreign}; {text}", "regenerate the answers (`hyperdflash data regenerate`) and train on them"
        )
    if got < POOR:
        mode = check_encoding(pair)
        fix = mode.fix if mode.status == WARNING else "train longer, on more answers that the target itself wrote"
        return found(FAIL, f"the drafter is poor on the target's own texts: {text}", fix)
    return found(OK, text)


def check_own_acceptance(pair: Pair) -> Finding:
    """Real decoding with the drafter in the target's own checkpoint."""
    decoded = decoded_rounds(pair)
    rates = by_position(decoded.per_position_acceptance_rates)
    text, figures = f"tau {decoded.acceptance_length:.2f} in decoding{rates}", {"decoding": decoded.to_dict()}
    if decoded.accepted_drafts < POOR:
        fix = "take the target and its module from one checkpoint, and its config.json too"
        return Finding(
            "acceptance", FAIL, f"the module is poor on the target's own texts: {text}", fix, False, figures
        )
    return Finding("acceptance", OK, text, figures=figures)


def by_position(rates: list[float]) -> str:
    return f" (by position {' '.join(f'{rate:.2f}' for rate in rates)})" if rates else ""


def foreign_data(pair: Pair) -> str | None:
    """What to report if the drafter is much better on the answers given with the prompts than on the target's."""
    texts = [pair.text(torch.tensor([ids]), torch.tensor([mask])) for ids, mask in pair.given]
    if sum(given.anchors.shape[1] for given in texts) < MIN_BLOCKS:
        return None
    given, own = (float(score.accepted().mean()) for score in (pair.measure(texts), pair.configured))
    if given < 1.5 * own + POOR:
        return None
    return (
        f"the drafter is right on the given answers ({given:.2f} drafts per block) but not on the target's own "
        f"({own:.2f}), so its training data was not written by this target"
    )


def decoded_rounds(pair: Pair) -> SpeculativeStats:
    """Rounds of real decoding, without the last one of a text, which its end cuts short, unless it is the only one."""
    stats = SpeculativeStats()
    for drafted in pair.drafted:
        rounds = drafted.speculation
        keep = slice(None, -1) if len(rounds.num_drafts) > 1 else slice(None)
        stats.extend(SpeculativeStats(rounds.num_drafts[keep], rounds.num_accepted[keep]))
    return stats


def predicted_rounds(pair: Pair) -> SpeculativeStats:
    """The rounds that decoding would have with the drafts of training's blocks, on the target's own texts."""
    stats, num_slots = SpeculativeStats(), pair.config.block_size - 1
    accepted = pair.configured.accepted().int().tolist()
    for text in pair.own:
        right, accepted = accepted[: text.anchors.shape[1]], accepted[text.anchors.shape[1] :]
        rounds, i = [], 0
        while i < len(right):
            rounds.append(right[i])
            i += right[i] + 1
        rounds = rounds[:-1] or rounds  # without the last one, as in `decoded_rounds`
        stats.extend(SpeculativeStats([num_slots] * len(rounds), rounds))
    return stats


def experiment(check: str, subject: str):
    """A check that reports one group of trials. Only the best of all trials is a cause: others follow from it."""

    def report(pair: Pair) -> Finding:
        score, number = float(pair.configured.accepted().mean()), sum(trial.check == check for trial in pair.trials)
        better = [trial for trial in pair.clearly_better if trial.check == check]
        if not better:
            text = f"{subject} as configured ({score:.2f} drafts per block)"
            text += f"; none of {number} other ways is clearly better"
            return Finding(check, OK, text, figures={"accepted_drafts": score})
        trial, best = better[0], pair.clearly_better[0]
        figures = {"accepted_drafts": score, "accepted_drafts_that_way": score + trial.gain}
        text = f"(that way it accepts {score + trial.gain:.2f} drafts per block instead of {score:.2f})"
        if trial is not best:
            return Finding(check, WARNING, f"also better as if trained {trial.what} {text}", figures=figures)
        # Being one position off is nearly the same on either side, so several trials may name the cause
        alike = [other.what for other in pair.clearly_better if other.ce_gain >= ALIKE * best.ce_gain]
        return Finding(
            check, FAIL, f"the drafter was trained {', or '.join(alike)} {text}", trial.fix, figures=figures
        )

    return report


CHECKS = (
    check_weights,
    check_encoding,
    check_trained,
    check_mask,
    check_fingerprint,
    experiment(MASK, "the mask token"),
    experiment(STATE, "the tapped state"),
    experiment(OUTPUT, "the output"),
    experiment(POSITIONS, "the rotary embedding"),
    experiment(SETTINGS, "the block"),
    check_two_paths,
    check_lossless,
    check_acceptance,
)


# A drafter in the target's own checkpoint has no training and no settings here that experiments could find wrong
OWN_CHECKS = (check_finite, check_lossless, check_own_acceptance)


def examine(pair: Pair) -> Iterator[Finding]:
    """The findings of all checks. A cause may hide those after it, so the first FAIL is the one to fix.

    Raises `ValueError` if the target writes too little text to judge by.
    """
    try:
        check_shapes(pair.config, pair.target.config)
    except ValueError as error:
        text, _, fix = str(error).partition(": ")
        yield Finding("shapes", FAIL, text, fix, is_last=True)
        return
    yield Finding("shapes", OK, "vocabulary, width, paths and layers are the target's")
    yield from run_checks(CHECKS, pair)


def run_checks(checks: Iterable[Callable[[Pair], Finding]], pair: Pair) -> Iterator[Finding]:
    """The findings, up to the last one that can be had."""
    for check in checks:
        finding = check(pair)
        yield finding
        if finding.is_last:
            return


# ------------------------------------------------------------------------------------------------------------- command


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, or `CAUSE_FOUND`.

    Raises `UsageError` for wrong options or folders in the wrong order; `ValueError` and `OSError` if the checks
    cannot run.
    """
    check_device_map(args.device_map)
    # Before anything is judged: a mistyped name or revision is not a reason why a drafter accepts little
    args.target, args.target_revision = resolve_checkpoint(args.target, args.target_revision)
    if args.drafter not in OWN_DRAFTERS:
        args.drafter, args.drafter_revision = resolve_checkpoint(args.drafter, args.drafter_revision)
    check_types(args)
    chats = read_chats(args.prompts, args.num_prompts)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    console = Console(highlight=False, soft_wrap=True, quiet=args.json)
    findings = []
    for finding in find(args, chats):
        findings.append(finding)
        console.print(
            f"[{STYLES[finding.status]}]{finding.status:8}[/]{finding.check:17} {escape(finding.sentence())}"
        )
    causes = [finding for finding in findings if finding.status == FAIL]
    cause = causes[0].sentence() if causes else None
    if args.json:
        keys = ("check", "status", "text", "fix", "figures")
        rows = [{key: getattr(finding, key) for key in keys} for finding in findings]
        print(json.dumps({"cause": cause, "findings": rows}, indent=2))
    warned = any(finding.status == WARNING for finding in findings)
    nothing = "No cause found" + (", but see the warnings." if warned else ": the pair is sound.")
    console.print(f"\n[bold]Cause: {escape(cause)}.[/]" if cause else f"\n{nothing}")
    return CAUSE_FOUND if causes else 0


def check_types(args: argparse.Namespace) -> None:
    """Raises `UsageError` unless the two names are a target's and a drafter's in this order."""
    names = {"target": (args.target, args.target_revision), "drafter": (args.drafter, args.drafter_revision)}
    if args.drafter in OWN_DRAFTERS:
        check_target(*names["target"])
        return
    types = {}
    for role, (name, revision) in names.items():
        types[role] = PreTrainedConfig.get_config_dict(name, revision=revision)[0].get("model_type")
    if (types["target"], types["drafter"]) == ("hyperdflash", "deepseek_v4"):
        raise UsageError(f"{args.target} is the drafter and {args.drafter} the target: name the target first")
    for role, model_type in (("target", "deepseek_v4"), ("drafter", "hyperdflash")):
        if types[role] != model_type:
            found = f"its model_type is {types[role]!r}" if types[role] else "it has no config.json with a model_type"
            raise UsageError(f"{names[role][0]} is not a {role}: {found}, not {model_type!r}")


def find(args: argparse.Namespace, chats: list[tuple[list[dict], list[dict]]]) -> Iterator[Finding]:
    """The findings; a drafter that cannot be loaded is the only one then."""
    errors = (StrictDataclassError, ValueError, OSError)
    is_own, encoding = args.drafter in OWN_DRAFTERS, {}
    try:  # what can be said before the target is loaded
        if is_own:
            folder = find_own_drafter(args.drafter, TargetCheckpoint(args.target, args.target_revision))
        else:
            config = HyperDFlashConfig.from_pretrained(args.drafter, revision=args.drafter_revision)
            encoding = config.encoding or {}
    except errors as error:
        yield Finding("loading", FAIL, " ".join(str(error.__cause__ or error).split()))
        return
    generation = args.generation or encoding.get("generation", "preview")
    encoding = {"mode": args.mode, "effort": args.effort, "generation": generation}
    try:
        check_options(**encoding)
    except ValueError as error:
        raise UsageError(str(error)) from error
    limit = check_target(args.target, args.target_revision).max_position_embeddings - args.max_new_tokens
    tokenizer = load_tokenizer(args.target, args.target_revision)
    prompts, given = encode_chats(chats, tokenizer, encoding, limit)
    target = load_target_model(args.target, args.target_revision, args.dtype, args.device_map)
    try:
        if is_own:
            drafter = load_native(args.drafter, folder, target.config).to(target.device)
        else:
            drafter = load_drafter(args.drafter, args.drafter_revision, args.dtype, target)
    except UsageError:  # of the options, not of the pair
        raise
    except errors as error:
        yield Finding("loading", FAIL, " ".join(str(error).split()))
        return
    pair = Pair(
        target,
        drafter,
        prompts,
        given,
        special_ids=tokenizer.get_added_vocab(),
        mode=args.mode,
        generation=generation,
        max_new_tokens=args.max_new_tokens,
    )
    yield Finding("loading", OK, "the drafter's tensors are those of its config")
    if is_own:
        yield from run_checks(OWN_CHECKS, pair)
    else:
        drafter.confidence_head = None  # all slots are judged, also those that it would not verify
        yield from examine(pair)


def read_chats(file: str | None, number: int) -> list[tuple[list[dict], list[dict]]]:
    """The first prompts of a file, or built-in ones: for each the messages to answer, and the given answer, if any.

    Raises `ValueError` that names a row without a prompt, `OSError` for a missing file.
    """
    if file is None:
        return [([{"role": "user", "content": prompt}], []) for prompt in BUILT_IN_PROMPTS[:number]]
    chats = []
    for source, row in islice(read_rows([file]), number):
        try:
            if isinstance(row, ValueError):
                raise row
            history, turns, answers = history_and_turns(row)
            chat = [*history, {"role": "user", "content": turns[0]}]
            encode_messages([*chat, *answers])
        except ValueError as error:
            raise ValueError(f"{source} is not a prompt: {error}") from error
        chats.append((chat, answers))
    return chats


def encode_chats(chats: list[tuple[list[dict], list[dict]]], tokenizer, encoding: dict, limit: int) -> tuple:
    """`Pair.prompts` and `Pair.given`. Raises `ValueError` for a prompt that leaves no room within `limit` tokens."""
    prompts, given = [], []
    for number, (chat, answers) in enumerate(chats, start=1):
        ids, _ = encode_with_mask(chat, tokenizer, add_generation_prompt=True, **encoding)
        if len(ids) > limit:
            raise ValueError(f"prompt {number} has {len(ids)} tokens: with --max-new-tokens, {limit} is the limit")
        prompts.append(torch.tensor([ids]))
        if answers:
            whole, mask = encode_with_mask([*chat, *answers], tokenizer, **encoding)
            given.append((whole[:limit], mask[:limit]))
    return prompts, given
