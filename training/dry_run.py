"""What a run would cost (`hyperdflash train --dry-run`), and where its time went (`--profile`)."""

import math

from torch import nn

from .arguments import HyperDFlashTrainingArguments
from .feature_cache import token_shapes


def steps_of(args: HyperDFlashTrainingArguments, num_samples: int) -> tuple[int, int, int]:
    """Samples per step, steps per epoch, and steps of the run."""
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    # Rounded up, as EpochSampler fills the last batch
    steps_per_epoch = -(-num_samples // samples)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(steps_per_epoch * args.num_train_epochs)
    return samples, steps_per_epoch, steps


def print_plan(args: HyperDFlashTrainingArguments, parts) -> None:
    """Print steps, tokens, memory and disk of a run that has not started.

    Args:
        parts (`training.train.Parts`): data, drafter and target of the run.
    """
    samples, steps_per_epoch, steps = steps_of(args, len(parts.train_dataset))
    tokens = parts.facts["num_tokens"]
    trainable, frozen = count_parameters(parts.model)
    print(f"target    {args.target}, drafter into {args.output_dir}")
    if args.eval_decode_prompts:
        print(f"decoding  {args.eval_decode_prompts} prompts at every evaluation, with the target")
    print(f"steps     {steps:,} of {samples} samples, {steps_per_epoch:,} per epoch")
    print(f"tokens    {tokens:,} per epoch, {tokens * steps // steps_per_epoch:,} in total")
    print(f"drafter   {trainable:,} parameters to train, {frozen:,} frozen")
    for what, size in memory(args, parts).items():
        print(f"memory    {size / 2**30:8.2f} GiB  {what}")
    print("memory    without activations: see the step below")
    kept = num_checkpoints(args, steps)
    # A checkpoint has the weights and AdamW's two moments in fp32
    print(f"disk      {kept * (trainable * 12 + frozen * 4) / 2**30:8.2f} GiB  {kept} checkpoints")
    if args.features == "offline" or args.features == "server" and args.keep_features:
        # Two bytes a number: features are stored in bf16
        print(f"disk      {tokens * token_width(parts) * 2 / 2**30:8.2f} GiB  features, in {args.features_dir}")


def memory(args: HyperDFlashTrainingArguments, parts) -> dict[str, int]:
    """Bytes that are known beforehand, by purpose."""
    trainable, frozen = count_parameters(parts.model)
    head = parts.features.head
    features = args.per_device_train_batch_size * args.max_length * token_width(parts)
    # Stored features of all micro-batches of a step are fetched before the first one; online, one at a time
    features *= 2 * args.gradient_accumulation_steps if args.features != "online" else 4
    sizes = {
        "weights, gradients and AdamW in fp32": trainable * 16 + frozen * 4,  # AdamW has two moments
        "the target's embedding and head": sum(t.numel() * t.element_size() for t in head.tensors.values()),
        "features of a step": features,
        # In fp32, about four buffers: logits, softmax, and the two distributions of the KL term
        "logits of a chunk and their gradients": args.loss_chunk_size * head.config.vocab_size * 4 * 4,
    }
    if parts.target is not None:
        sizes["the target"] = sum(p.numel() * p.element_size() for p in parts.target.parameters())
    return sizes


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Trainable and frozen parameters."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trainable, sum(p.numel() for p in model.parameters()) - trainable


def token_width(parts) -> int:
    """How many numbers a token's features have."""
    return sum(map(math.prod, token_shapes(parts.drafter.config).values()))


def num_checkpoints(args: HyperDFlashTrainingArguments, steps: int) -> int:
    if args.save_strategy == "no":
        return 1  # the one at the end
    if args.save_strategy == "epoch":
        return args.save_total_limit or math.ceil(args.num_train_epochs)
    # save_steps below 1 is a share of the run
    if args.save_total_limit:
        return args.save_total_limit
    return max(1, int(steps // args.save_steps) if args.save_steps >= 1 else int(1 / args.save_steps))


def print_profile(seconds: dict[str, float]) -> None:
    """Print shares of the run: the drafter's is the step without target and loss."""
    total = seconds["run"]
    target, loss, data = (seconds.get(part, 0.0) for part in ("target", "loss", "data"))
    shares = {
        "target": target,
        "loss": loss,
        "drafter, forward and backward": seconds["step"] - target - loss,
        "data": data,
        "optimizer, evaluation, checkpoints": total - seconds["step"] - data,
    }
    print(f"profile   {total:.1f} s in total")
    for part, spent in shares.items():
        print(f"profile   {spent / total:6.1%}  {part}")
