"""Shared fixtures. Tests that stem from a publicly reported case carry its id (G7, Z3, ...)."""

import mok
import pytest
import torch


@pytest.fixture(autouse=True)
def fresh():
    """The same seed, and no default group left by another test."""
    torch.manual_seed(1234)
    yield
    mok.group._default = None
