"""Shared fixtures. Tests named after a row of the table of public cases carry its id (G7, Z3, ...)."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded(request):
    torch.manual_seed(1234)
    torch.set_num_threads(2)
