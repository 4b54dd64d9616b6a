"""`make device`'s script, as far as it can be told without a GPU."""

import device_check
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_pair_is_loaded_in_one_dtype_with_prompts_as_ids(dtype):
    target, drafter, prompts = device_check.load_pair("cpu", str(dtype).removeprefix("torch."))
    assert {model.dtype for model in (target, drafter)} == {dtype}
    assert {model.device.type for model in (target, drafter)} == {"cpu"}
    assert all(ids.shape[0] == 1 and ids.max() < target.config.vocab_size for ids in prompts)
    assert len(prompts) == len(device_check.PROMPTS)
