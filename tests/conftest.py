"""Tests run offline, on one thread: OpenMP's spin waits make tiny models many times slower on a busy machine."""

import base64
import gc
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # also in processes that a test starts

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_finish():
    """Every collection of garbage, and each training run asks for one, would look through all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def data_cache(tmp_path_factory):
    """Encoded data sets go to a folder of the tests' own, also in processes that a test starts."""
    folder = str(tmp_path_factory.mktemp("datasets"))
    os.environ["HF_DATASETS_CACHE"] = folder
    import datasets

    datasets.config.HF_DATASETS_CACHE = folder


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(autouse=True)
def pictures_of_one_pixel(request, monkeypatch):
    """Where a test is not about pictures (mark `pictures`), they are not rendered: that took a quarter of all time."""
    if request.node.get_closest_marker("pictures") is not None:
        return

    def save(self, file, **kwargs):
        if hasattr(file, "write"):
            file.write(PIXEL)
        else:
            Path(file).write_bytes(PIXEL)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
