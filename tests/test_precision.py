"""bf16 where the device has it: on other CPUs, the same work in fp32."""

import platform

import pytest
import torch
from test_trainer import UNEVEN, losses, make_rows, make_trainer
from tiny_v4 import tiny_drafter, tiny_target

from hyperdflash.common import precision
from hyperdflash.training.writers import TargetWriter


@pytest.fixture(params=[False, True], ids=["a CPU without bf16", "a CPU with bf16"])
def bf16(request, monkeypatch) -> bool:
    """Whether this CPU has bf16, as far as anybody can tell."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return request.param


def test_a_cpu_is_asked_for_its_instructions_and_an_accelerator_is_not(bf16, monkeypatch):
    assert precision.has_bf16() is bf16
    assert precision.has_bf16("cuda")
    assert precision.load_dtype("auto") == ("auto" if bf16 else "float32")
    assert precision.load_dtype("bfloat16") == "bfloat16"  # asked for
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert precision.has_bf16()


def test_training_in_bf16_is_training_in_fp32_where_the_cpu_has_no_bf16(tmp_path, bf16):
    """No autocast, and the target's head in fp32; the setting itself stays, as a resumed run is compared by it."""
    target = tiny_target(num_hash_layers=1).bfloat16()

    def run(**options):
        model = tiny_drafter(target, block_size=4).float().train()
        trainer = make_trainer(tmp_path, make_rows(UNEVEN), model=model, target=target, **options)
        trainer.train()
        return trainer

    mixed, plain = run(bf16=True), run()
    assert mixed.args.bf16
    assert mixed.args.mixed_precision == ("bf16" if bf16 else "no")
    assert mixed.lm_head.dtype == plain.lm_head.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert (losses(mixed) == losses(plain)) is not bf16


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_target_that_answers_is_loaded_in_fp32_where_the_cpu_has_no_bf16(tmp_path, bf16, dtype):
    """Unless bf16 was asked for. The dtype is one of the settings that a file's answers depend on."""
    tiny_target().bfloat16().save_pretrained(tmp_path)
    writer = TargetWriter(str(tmp_path), dtype=dtype)
    writer.load()
    in_fp32 = dtype == "auto" and not bf16
    assert writer.target.lm_head.weight.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    assert writer.identity["dtype"] == ("float32" if in_fp32 else dtype)
