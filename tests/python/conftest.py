"""Shared fixtures. Tests that stem from a publicly reported case carry its id (G7, Z3, ...)."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded(request):
    torch.manual_seed(1234)
    torch.set_num_threads(2)
