"""Shared fixtures. Tests that stem from a publicly reported case carry its id (G7, Z3, ...)."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh():
    """The same seed, and no default group left by another test."""
    torch.manual_seed(1234)
    yield
    if "mok" in sys.modules:
        sys.modules["mok"].group._default = None
