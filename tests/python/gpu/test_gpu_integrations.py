"""Other projects' MoE layers computed by mok on a GPU, where they are installed, and the stand-ins
of Megatron's modules of tests/python/test_integration_megatron.py."""

import copy

import pytest
import ranks
import torch
from gpu_problems import DEVICE, gpu_problem
from mok.integrations import transformers as integration
from test_integration_megatron import (
    KINDS,
    boundary,  # noqa: F401  (a fixture)
    check_backend,
    check_main_grad,
    needs_megatron,
    on_megatron,
)
from test_integration_torchtitan import compare_layers, needs_torchtitan
from test_integration_transformers import FAMILIES, close, tiny

BF16 = torch.bfloat16


def loaded(family, folder, layers):
    """A model that was saved and loaded, on the GPU."""
    model = tiny(family, BF16, hidden_size=128, inner=64, head_dim=32, num_hidden_layers=layers)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=BF16).to(DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_of_transformers_computes_the_same(family, tmp_path):
    model = loaded(family, tmp_path, 1)
    other = integration.replace_experts(copy.deepcopy(model))
    ids = torch.randint(0, 60, (2, 40), device=DEVICE)
    outputs = [m(input_ids=ids, labels=ids) for m in (model, other)]
    assert close(outputs[1].logits, outputs[0].logits, BF16)
    assert close(outputs[1].loss, outputs[0].loss, BF16)
    for out in outputs:
        out.loss.backward()
    for (name, a), (_, b) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        wanted = torch.zeros_like(b) if b.grad is None else b.grad
        got = torch.zeros_like(a) if a.grad is None else a.grad
        assert close(got, wanted, BF16), name


@pytest.mark.parametrize("family", FAMILIES)
def test_saving_a_model_of_transformers(family, tmp_path):
    model = loaded(family, tmp_path / "model", 2)
    other = integration.replace_experts(copy.deepcopy(model))
    ids = torch.randint(0, 60, (2, 40), device=DEVICE)
    with torch.no_grad():
        want = other(input_ids=ids).logits
        assert close(want, model(input_ids=ids).logits, BF16)
    other.save_pretrained(tmp_path / "other")
    back = type(model).from_pretrained(tmp_path / "other", dtype=BF16).to(DEVICE)
    for (name, a), (_, b) in zip(
        back.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    with torch.no_grad():
        assert torch.equal(integration.replace_experts(back)(input_ids=ids).logits, want)


@pytest.mark.parametrize("kind", KINDS)
def test_megatrons_experts(kind, boundary):  # noqa: F811
    check_backend(kind, gpu_problem(31, topk=2, shared=64, shared_gate=True, limit=2.0), boundary)


@pytest.mark.parametrize("kind", ["in one buffer", "one parameter", "TEGroupedMLP"])
def test_megatrons_main_grad(kind, boundary):  # noqa: F811
    check_main_grad(kind, gpu_problem(32, topk=2))


@needs_megatron
def test_a_layer_of_megatron():
    assert ranks.run(1, on_megatron, BF16, "cuda", timeout=100) == [[]]


@needs_torchtitan
def test_a_layer_of_torchtitan():
    compare_layers(BF16, DEVICE)
