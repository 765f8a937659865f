"""What every test shares: no network, one thread, no window, shapes checked at run time, one loaded model."""

from __future__ import annotations

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"

import pytest
import torch
from jaxtyping import install_import_hook

# More threads than free cores make everything slower, and an order of addition that varies makes bit-equality fail.
torch.set_num_threads(1)


def pytest_configure(config):
    """Check shapes in tests; benchmarks measure what users run, where nothing is checked."""
    if not any(pattern.startswith("bench") for pattern in config.getini("python_files")):
        install_import_hook("resstream", "beartype.beartype")


@pytest.fixture(autouse=True)
def _figures_are_closed():
    """What one test draws is not there in the next."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session")
def smollm2():
    """The embedded default model, loaded once; tests leave it as they found it."""
    import resstream

    return resstream.load("smollm2")
