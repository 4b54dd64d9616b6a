"""Tests run offline, on one thread: OpenMP's spin waits make tiny models many times slower on a busy machine."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # also in processes that a test starts

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def data_cache(tmp_path_factory):
    """Encoded data sets go to a folder of the tests' own, also in processes that a test starts."""
    folder = str(tmp_path_factory.mktemp("datasets"))
    os.environ["HF_DATASETS_CACHE"] = folder
    import datasets

    datasets.config.HF_DATASETS_CACHE = folder
