"""Tests run offline, on one thread: OpenMP's spin waits make tiny models many times slower on a busy machine."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)
