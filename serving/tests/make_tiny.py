"""Random DeepSeek-V4 targets that vLLM's CPU kernels take, and drafters for them: what `serving/tests` runs on.

    .venv/bin/python serving/tests/make_tiny.py        # seconds; writes serving/build, in the main environment

vLLM's environment has another transformers, so everything crosses as files: targets in the official naming, exported
drafters, and of each drafter the states that transformers computes for given inputs.

The targets are peaky: the head's row of token t + 1 is token t's embedding, so that logits are far apart and rounding
decides next to nothing, while all layers have their say.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
from official import official_config, save_official
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.utils import logging

from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.generation.dspark import DeepseekV4DSpark, load_dspark
from hyperdflash.generation_hyperdflash import DraftRequest
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.pairing_hyperdflash import fingerprint_tensors, target_fingerprint
from hyperdflash.serving.vllm_format import NESTED, vllm_config
from hyperdflash.training.export import export_drafter

BUILD = Path(__file__).resolve().parents[1] / "build"
TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "target"
SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
VOCAB_SIZE, MASK_TOKEN_ID, MAIN_TOKEN_ID = 320, 319, 201
LAYERS = {"sliding": [SLIDING] * 3, "mixed": [SLIDING, SLIDING, CSA, HCA, SLIDING]}


def target_config(layer_types, **kwargs) -> DeepseekV4Config:
    """The smallest V4 that the CPU kernels take: head_dim 512, 64 experts of which 6 are used."""
    return DeepseekV4Config(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "num_hidden_layers": len(layer_types),
            "layer_types": layer_types,
            "num_attention_heads": 4,
            "head_dim": 512,
            "q_lora_rank": 64,
            "o_lora_rank": 64,
            "o_groups": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 64,
            "num_hash_layers": int(HCA in layer_types),
            "max_position_embeddings": 2048,
            "initializer_range": 0.06,
            "eos_token_id": None,
            **kwargs,
        }
    )


def peaky_target(layer_types, seed: int = 0) -> DeepseekV4ForCausalLM:
    """A random target whose likeliest next token of t is t + 1, unless the layers say otherwise.

    Behind every eighth token, and behind the mask, it is `MAIN_TOKEN_ID`: one fixed draft is right now and then.
    """
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(target_config(layer_types)).eval()
    with torch.no_grad():
        embed, main = torch.randn(VOCAB_SIZE, 128), torch.randn(128)
        head = embed.roll(1, dims=0)
        to_main = torch.arange(0, VOCAB_SIZE, 8)
        embed[to_main] += main
        embed[MASK_TOKEN_ID] = main
        head[to_main + 1] = head[MASK_TOKEN_ID] = 0
        head[MAIN_TOKEN_ID] = main
        model.model.embed_tokens.weight.copy_(embed)
        model.lm_head.weight.copy_(0.2 * head)
        model.model.hc_head.hc_fn.normal_(std=0.02)
        for layer in model.model.layers:
            if layer.mlp.is_hash:
                table = layer.mlp.gate.tid2eid
                table.copy_(torch.rand(table.shape[0], 64).topk(table.shape[1]).indices)
    return model


def save_standin(target, folder: Path) -> None:
    """The checkpoint of `standin.py`: embedding, head and hc_head are the target's, so that its drafters fit."""
    torch.manual_seed(5)
    config, m = target.config, target.config.hc_mult
    D, kv, wide = config.hidden_size, 64, 192
    shapes = {"q_proj": (D, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, D)}
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    shapes |= {"mlp.gate_proj": (wide, D), "mlp.up_proj": (wide, D), "mlp.down_proj": (D, wide)}
    norms = {"self_attn.q_norm": 32, "self_attn.k_norm": 32, "input_layernorm": D, "post_attention_layernorm": D}
    head = target.model.hc_head
    tensors = {
        "embed.weight": target.model.embed_tokens.weight,
        "head.weight": target.lm_head.weight,
        "norm.weight": target.model.norm.weight,
        **{f"hc_head_{name}": getattr(head, f"hc_{name}") for name in ("fn", "base", "scale")},
        "read": torch.rand(config.num_hidden_layers, m).softmax(-1),
        "write": 0.5 + torch.rand(config.num_hidden_layers, m),
    }
    for i in range(config.num_hidden_layers):
        for name, shape in shapes.items():
            tensors[f"layers.{i}.{name}.weight"] = 0.06 * torch.randn(shape)
        for name, width in norms.items():
            tensors[f"layers.{i}.{name}.weight"] = torch.ones(width)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    fields = ("vocab_size", "hidden_size", "num_hidden_layers", "hc_mult", "rms_norm_eps", "max_position_embeddings")
    standin = {
        # Of no model that vLLM treats in a way of its own
        "model_type": "qwen3",
        "architectures": ["DeepseekV4ForCausalLM"],
        "dtype": "bfloat16",
        **{name: getattr(config, name) for name in fields},
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": wide,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(standin, indent=2))


def drafter_config(target, **kwargs) -> HyperDFlashConfig:
    """A drafter whose pages of the cache are no larger than the target's: one key/value head."""
    config = target.config
    return HyperDFlashConfig(
        **{
            "block_size": 4,
            "mask_token_id": MASK_TOKEN_ID,
            "hc_mult": config.hc_mult,
            "target_hidden_size": config.hidden_size,
            "target_num_hidden_layers": config.num_hidden_layers,
            "target_name_or_path": "tiny",
            "target_fingerprint": target_fingerprint(fingerprint_tensors(target)),
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "sliding_window": 48,
            "max_position_embeddings": 2048,
            "initializer_range": 0.05,
            **kwargs,
        }
    )


def random_drafter(target, *, seed: int = 1, loud: bool = False, **kwargs) -> HyperDFlashModel:
    """Random weights around the inherited gate, no norm at one.

    It drafts the mask's own token, whatever the context; a loud one drafts what its layers find there.
    """
    torch.manual_seed(seed)
    drafter = HyperDFlashModel(drafter_config(target, **kwargs, **({"initializer_range": 0.3} if loud else {}))).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 1 or "path_norm" in name:
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
            if loud and "q_norm" in name:
                parameter.mul_(8)  # a few positions decide, not the mean of all
        if drafter.config.reducer == "hc_gate":
            head = target.model.hc_head
            for name in ("hc_fn", "hc_base", "hc_scale"):
                getattr(drafter.reducer, name).copy_(getattr(head, name))
    return drafter


def silent_drafter(target, **kwargs) -> HyperDFlashModel:
    """Layers that add nothing, so every draft is the token that the head finds in the mask's embedding."""
    drafter = random_drafter(target, **kwargs)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        drafter.norm.weight.fill_(1)
    return drafter


def chain_drafter(target) -> HyperDFlashModel:
    """A silent drafter whose sequential head drafts the successor of the token before, as the target nearly always
    goes on: right only where it is told the true anchor and its own drafts, in order."""
    drafter = silent_drafter(target, draft_head="markov", markov_rank=64, draft_confidence=True)
    with torch.no_grad():
        w1 = torch.randn(VOCAB_SIZE, 64)
        drafter.markov_head.markov_w1.copy_(w1)
        drafter.markov_head.markov_w2.copy_(2 * w1.roll(1, dims=0))
    return drafter


def markov_drafter(target) -> HyperDFlashModel:
    """A random drafter whose gated bias decides as much as its logits."""
    drafter = random_drafter(target, draft_head="markov", markov_rank=16, markov_gate=True)
    for weight in (drafter.markov_head.markov_w1, drafter.markov_head.markov_w2):
        torch.nn.init.normal_(weight)
    return drafter


def sequential_logits(drafter, hidden: torch.Tensor, noise_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A head's weight, and the logits that the drafter's own loop chooses from, given the block's `hidden`."""
    lm_head = torch.nn.Linear(drafter.config.hidden_size, drafter.config.vocab_size, bias=False)
    lm_head.weight.data = (4 * lm_head.weight).bfloat16().float()
    rows = []

    def choose(logits):
        rows.append(logits)
        return logits.argmax(-1)

    drafter.draft_hidden = lambda *args: (hidden, None)
    target = SimpleNamespace(lm_head=lm_head, model=SimpleNamespace(embed_tokens=lm_head))  # read for its dtype
    drafter.propose(DraftRequest(None, None, noise_ids, 0, len(hidden), target, cache=None), choose)
    return {"lm_head": lm_head.weight.detach(), "ids": noise_ids[0], "logits": torch.cat(rows)}


def write_states(drafter, file: Path, *, num_context: int = 100) -> None:
    """Inputs, reduced features, final states and sequential logits of one block in fp32, from the weights as exported
    (bf16)."""
    config = drafter.config
    torch.manual_seed(2)
    residual = torch.randn(1, num_context, config.hc_mult, config.target_hidden_size).bfloat16().float()
    embeds = torch.randn(1, config.block_size, config.hidden_size).bfloat16().float()
    positions = torch.arange(num_context + config.block_size)[None]
    with torch.no_grad():
        reduced = drafter.reducer(residual)
        states = drafter(noise_embeds=embeds, context_hidden_states=residual, position_ids=positions)
        noise_ids = torch.tensor([[7] + [MASK_TOKEN_ID] * (config.block_size - 1)])
        with_head = config.draft_head == "markov"
        more = sequential_logits(drafter, states.last_hidden_state[0, 1:], noise_ids) if with_head else {}
    tensors = {
        "residual": residual[0].flatten(1),
        "embeds": embeds[0],
        "reduced": reduced[0],
        "states": states.last_hidden_state[0],
        **more,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def export(drafter, folder: Path) -> None:
    """The transformers folder, and beside it what vLLM loads with the states to compare."""
    for part in (folder / "hf", folder / "served"):
        shutil.rmtree(part, ignore_errors=True)
    drafter.save_pretrained(folder / "hf")
    export_drafter(folder / "hf", folder / "served", format="vllm")
    rounded = HyperDFlashModel.from_pretrained(folder / "hf", dtype=torch.bfloat16).float().eval()
    write_states(rounded, folder / "states.safetensors")


def export_stock(target, folder: Path) -> None:
    """A vanilla DFlash draft of two tapped layers, as others publish them: no class of ours serves it."""
    layers = {"context_source": "hidden_layers", "target_layer_ids": [0, 1]}
    drafter = random_drafter(target, loud=True, reducer="fc", **layers)
    config = vllm_config(drafter_config(target, reducer="fc"))
    del config[NESTED]
    config["architectures"] = ["DFlashDraftModel"]
    config["dflash_config"]["target_layer_ids"] = [0, 1]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = {"context_norm.weight": "hidden_norm.weight", "reducer.fc.weight": "fc.weight"}
    tensors = {names.get(name, name): tensor.bfloat16() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_dspark(target, folder: Path, *, num_context: int = 150) -> None:
    """A random DSpark module as DeepSeek's checkpoints have it, and what it computes for one block as it is read from
    there, in fp32: the block's states, logits, and bias and confidence behind given tokens. The context is longer than
    the window (128)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [0, 2],
        "dspark_noise_token_id": MASK_TOKEN_ID,
        "dspark_markov_rank": 16,
    }
    torch.manual_seed(5)
    module = DeepseekV4DSpark(DeepseekV4Config(**{**target.config.to_dict(), **settings}))
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.ndim == 1:  # norms, sinks, router bias and the scales and bases of hyper-connections
                tensor.add_(torch.randn(tensor.shape), alpha=0.5 if "sinks" in name else 0.1)
    save_file(module.official_state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config = {**official_config(target.config), **settings, "n_mtp_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    module, config = load_dspark(folder, target.config), target.config
    residual = torch.randn(1, num_context, config.hc_mult, 2 * config.hidden_size)
    embeds, ids = torch.randn(1, 5, config.hidden_size), torch.randint(config.vocab_size, (5,))
    lm_head = torch.randn(config.vocab_size, config.hidden_size) / 8
    with torch.no_grad():
        hidden, collapsed = module(embeds, residual)
        states, bias = module.markov_head(ids)
        confidence = module.confidence_head(collapsed[0], states).sigmoid()
    tensors = {
        "residual": residual[0],
        "embeds": embeds[0],
        "ids": ids,
        "lm_head": lm_head,
        "collapsed": collapsed[0],
        "logits": hidden[0] @ lm_head.T,
        "bias": bias,
        "confidence": confidence,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "states.safetensors")


def write_recipe(folder: Path, target: Path) -> None:
    """Token rows around pages and window, two of them alike, and a recipe that trains on features from vLLM."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, target)
    generator = torch.Generator().manual_seed(4)
    for split, lengths in (("train", (5, 64, 130, 200, 17, 9, 128, 63)), ("eval", (40, 70))):
        rows = [torch.randint(VOCAB_SIZE - 1, (n,), generator=generator).tolist() for n in lengths]
        rows = [{"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1)} for ids in [*rows, rows[0]]]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        f"target: {target}\ntrain_data: [{folder / 'train.jsonl'}]\neval_data: [{folder / 'eval.jsonl'}]\n"
        f"output_dir: {folder / 'run'}\nfeatures: server\nmax_length: 256\n"
        f"drafter: {{mask_token_id: {MASK_TOKEN_ID}, num_hidden_layers: 1, block_size: 4}}\nuse_cpu: true\n"
        "bf16: true\nmax_steps: 6\nper_device_train_batch_size: 2\nnum_anchors: 4\nlogging_steps: 1\nreport_to: none\n"
    )


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name, layer_types in LAYERS.items():
        target = peaky_target(layer_types)
        save_official(target, BUILD / name / "target")
        export(chain_drafter(target), BUILD / name / "chain")
        if name == "sliding":
            save_standin(target, BUILD / "standin" / "target")
            full = "full_attention"
            export(silent_drafter(target), BUILD / name / "silent")
            export(random_drafter(target), BUILD / name / "random")
            for reducer in ("mean", "fc"):
                export(random_drafter(target, reducer=reducer), BUILD / name / reducer)
            export(random_drafter(target, layer_types=[full] * 2, loud=True), BUILD / name / "full")
            export(random_drafter(target, layer_types=[SLIDING, full]), BUILD / name / "both")
            export(random_drafter(target, reducer_path_norm=False), BUILD / name / "inherited")
            export(markov_drafter(target), BUILD / name / "markov")
            export_stock(target, BUILD / name / "stock")
            write_dspark(target, BUILD / name / "dspark")
            export(random_drafter(peaky_target(layer_types, seed=3)), BUILD / name / "stranger")
    write_recipe(BUILD / "features", BUILD / "sliding" / "target")
    (BUILD / "made.json").write_text(json.dumps({"targets": list(LAYERS)}))
    print(f"{BUILD}: targets {', '.join(LAYERS)}, and their drafters")


if __name__ == "__main__":
    main()
