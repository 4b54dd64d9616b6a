"""`hyperdflash generate TARGET [DRAFTER]`: a prompt or chat in, streamed text and a line of statistics out.

    hyperdflash generate examples/tiny/target examples/tiny/drafter --prompt "Find the value of d: 3*d + 4 = 19" \\
        --show-drafts
    hyperdflash generate TARGET mtp ...     # or dspark: the drafter in the target's own checkpoint
"""

import argparse
import sys
import time
from contextlib import nullcontext

import torch

from ..common.checkpoint import (
    TargetCheckpoint,
    check_device_map,
    check_drafter,
    check_target,
    encoding_mismatch,
    load_drafter,
    load_target_model,
    load_tokenizer,
    resolve_checkpoint,
)
from ..common.console import UsageError
from ..common.files import read_json, read_text
from ..common.options import OWN_DRAFTERS
from ..configuration_hyperdflash import HyperDFlashConfig
from ..encoding_deepseek_v4 import encode_messages, encode_with_mask
from .comparison import describe
from .own_drafter import find_own_drafter, load_native
from .streaming import LEGEND, DraftStreamer
from .trace import RoundRecorder, check_trace_path, write_trace


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Everything that needs no weights is checked before any is loaded."""
    messages = read_messages(args)
    encode_messages(messages, mode=args.mode, effort=args.effort, generation=args.generation)
    if args.trace is not None:
        check_trace_path(args.trace)
    check_device_map(args.device_map)
    target_source = resolve_checkpoint(args.target, args.target_revision)
    config = check_target(*target_source)
    drafter_config = None
    if args.drafter in OWN_DRAFTERS:
        own = find_own_drafter(args.drafter, TargetCheckpoint(*target_source), args.num_assistant_tokens)
    elif args.drafter is not None:
        drafter_source = resolve_checkpoint(args.drafter, args.drafter_revision)
        drafter_config = check_drafter(*drafter_source, config)
    tokenizer = load_tokenizer(*target_source)
    input_ids = prompt_ids(messages, tokenizer, args)
    check_length(input_ids.shape[1], args.max_new_tokens, config.max_position_embeddings)
    if drafter_config is not None and not args.raw:
        warn_of_encoding(drafter_config, args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target = load_target_model(*target_source, args.dtype, args.device_map)
    drafter = None
    if args.drafter in OWN_DRAFTERS:
        drafter = load_native(args.drafter, own, target.config, args.num_assistant_tokens).to(target.device)
    elif args.drafter is not None:
        drafter = load_drafter(*drafter_source, args.dtype, target)
    streamer = DraftStreamer(tokenizer)
    if args.show_drafts and streamer.console.is_terminal:
        streamer.console.print(LEGEND)
    recorder = RoundRecorder(target, drafter, tokenizer) if args.trace is not None else nullcontext()
    with recorder:
        output, seconds = timed_generate(target, input_ids.to(target.device), args, drafter, streamer)
    num_new = output.sequences.shape[1] - input_ids.shape[1]
    line = f"{num_new} tokens in {seconds:.2f} s, {num_new / seconds:.1f} tokens/s"
    if drafter is not None:
        line += f"; {describe(output.speculation)}"
    print(line, file=sys.stderr)
    if args.trace is not None:
        write_page(args, recorder, messages)
    return 0


def check_length(num_prompt_tokens: int, max_new_tokens: int, limit: int) -> None:
    """Raises `UsageError` for an answer that would not fit in the target's positions."""
    if num_prompt_tokens + max_new_tokens > limit:
        raise UsageError(
            f"{num_prompt_tokens} prompt tokens and --max-new-tokens {max_new_tokens} exceed the target's {limit} "
            "positions"
        )


def warn_of_encoding(config: HyperDFlashConfig, args: argparse.Namespace) -> None:
    """One line on stderr if the drafter was trained on another mode or generation of the chat encoding."""
    if text := encoding_mismatch(config, args.mode, args.generation):
        print(f"hyperdflash generate: warning: the drafter {text}; it will accept less", file=sys.stderr)


def write_page(args: argparse.Namespace, recorder: RoundRecorder, messages: list[dict]) -> None:
    """The page of --trace, under the last message."""
    title = " ".join(messages[-1]["content"].split())
    facts = {"Seed": str(args.seed)} if args.temperature > 0 else None
    write_trace(args.trace, [recorder.trace(title if len(title) <= 100 else title[:99] + "…", facts)])
    print(f"{args.trace}: {len(recorder.stats.num_drafts)} rounds", file=sys.stderr)


def timed_generate(target, input_ids: torch.LongTensor, args: argparse.Namespace, drafter, streamer) -> tuple:
    """`generate` with the command's options; returns its output and the seconds it took."""
    torch.manual_seed(args.seed)
    options = {"do_sample": args.temperature > 0}
    if options["do_sample"]:
        options |= {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    if args.num_assistant_tokens is not None:
        options["num_assistant_tokens"] = args.num_assistant_tokens
    start = time.perf_counter()
    output = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        assistant_model=drafter,
        streamer=streamer,
        max_new_tokens=args.max_new_tokens,
        return_dict_in_generate=True,
        **options,
    )
    return output, time.perf_counter() - start


def read_messages(args: argparse.Namespace) -> list[dict]:
    """The chat to continue. Raises `ValueError` that names the file for anything but a list of messages."""
    if args.chat_file is None:
        text = args.prompt if args.prompt is not None else read_text(args.prompt_file)
        if not text.strip():
            raise ValueError(f"{args.prompt_file} is empty")
        return [{"role": "user", "content": text}]
    chat = read_json(args.chat_file)
    messages = chat.get("messages") if isinstance(chat, dict) else chat
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f'{args.chat_file} must hold a list of {{"role", "content"}} messages')
    return messages


def prompt_ids(messages: list[dict], tokenizer, args: argparse.Namespace) -> torch.LongTensor:
    """Prompt ids `(1, T)` in V4's chat encoding, or of the bare text with --raw."""
    if args.raw:
        text = "\n".join(message["content"] for message in messages)
        return torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]])
    ids, _ = encode_with_mask(
        messages,
        tokenizer,
        mode=args.mode,
        effort=args.effort,
        generation=args.generation,
        add_generation_prompt=True,
    )
    return torch.tensor([ids])
