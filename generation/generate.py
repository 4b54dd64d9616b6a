"""`hyperdflash generate TARGET [DRAFTER]`: a prompt or chat in, streamed text and a line of statistics out.

    hyperdflash generate examples/tiny/target examples/tiny/drafter --prompt "Find the value of d: 3*d + 4 = 19" \\
        --show-drafts
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext

import torch

from ..common.checkpoint import load_drafter, load_target
from ..encoding_deepseek_v4 import encode_messages, encode_with_mask
from .decoding import describe
from .streaming import LEGEND, DraftStreamer
from .trace import RoundRecorder, check_trace_path, write_trace


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    messages = read_messages(args)  # before the model: a mistake should not cost a load
    encode_messages(messages, mode=args.mode, effort=args.effort, generation=args.generation)
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    if args.temperature < 0:
        raise ValueError(f"--temperature must be 0 (greedy) or above, got {args.temperature}")
    if args.show_drafts and args.drafter is None:
        raise ValueError("--show-drafts needs a drafter: hyperdflash generate TARGET DRAFTER ...")
    if args.trace is not None:
        if args.drafter is None:
            raise ValueError("--trace needs a drafter: hyperdflash generate TARGET DRAFTER ...")
        check_trace_path(args.trace)
    if args.threads:
        torch.set_num_threads(args.threads)
    target, tokenizer = load_target(args.target, args.target_revision, args.dtype, args.device_map)
    drafter = load_drafter(args.drafter, args.drafter_revision, args.dtype, target) if args.drafter else None
    input_ids = prompt_ids(messages, tokenizer, args).to(target.device)
    limit = target.config.max_position_embeddings
    if input_ids.shape[1] + args.max_new_tokens > limit:
        raise ValueError(
            f"{input_ids.shape[1]} prompt tokens and --max-new-tokens {args.max_new_tokens} exceed the target's "
            f"{limit} positions"
        )
    streamer = DraftStreamer(tokenizer)
    if args.show_drafts and streamer.console.is_terminal:
        streamer.console.print(LEGEND)
    recorder = RoundRecorder(target, drafter, tokenizer) if args.trace is not None else nullcontext()
    with recorder:
        output, seconds = timed_generate(target, input_ids, args, drafter, streamer)
    num_new = output.sequences.shape[1] - input_ids.shape[1]
    line = f"{num_new} tokens in {seconds:.2f} s, {num_new / seconds:.1f} tokens/s"
    if drafter is not None:
        line += f"; {describe(output.speculation)}"
    print(line, file=sys.stderr)
    if args.trace is not None:
        write_page(args, recorder, messages)
    return 0


def write_page(args: argparse.Namespace, recorder: RoundRecorder, messages: list[dict]) -> None:
    """The page of --trace, under the last message."""
    title = " ".join(messages[-1]["content"].split())
    facts = {"Seed": str(args.seed)} if args.temperature > 0 else None
    write_trace(args.trace, [recorder.trace(title if len(title) <= 100 else title[:99] + "…", facts)])
    print(f"{args.trace}: {len(recorder.stats.num_drafts)} rounds", file=sys.stderr)


def timed_generate(target, input_ids, args, drafter, streamer):
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
    """The chat to continue. Raises `ValueError` that names the file for anything else than a list of messages."""
    if args.chat_file is None:
        text = args.prompt if args.prompt is not None else args.prompt_file.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise ValueError("the prompt is empty")
        return [{"role": "user", "content": text}]
    try:
        chat = json.loads(args.chat_file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{args.chat_file} is no JSON: {error}") from error
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
