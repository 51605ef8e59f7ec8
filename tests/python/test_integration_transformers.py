"""Hugging Face models whose experts mok computes; tiny ones with random weights."""

import copy

import pytest
import ranks
import torch
from mok.integrations import transformers as integration
from torch import nn

TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}


def close(a, b, dtype):
    a, b = a.detach().double(), b.detach().double()
    return (a - b).norm() <= TOLERANCE[dtype] * b.norm()


# ---- the ModuleList of older versions, as stand-ins ------------------------------------------


class Expert(nn.Module):
    def __init__(self, hidden, inner, names):
        super().__init__()
        self.names = names
        for name, (rows, columns) in zip(
            names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
        ):
            setattr(self, name, nn.Linear(columns, rows, bias=False))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class _Block(nn.Module):
    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, hidden=24, inner=10, experts=6, topk=2):
        super().__init__()
        self.top_k = topk
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList([Expert(hidden, inner, self.names) for _ in range(experts)])

    def forward(self, x):
        flat = x.flatten(0, -2)
        logits = self.gate(flat)
        weights, ids = logits.float().softmax(-1).topk(self.top_k, -1)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            t, k = (ids == e).nonzero(as_tuple=True)
            y = y.index_add(0, t, (expert(flat[t]) * weights[t, k, None]).to(y.dtype))
        return y.view(x.shape), logits


class Qwen3MoeSparseMoeBlock(_Block):
    norm_topk_prob = False


class MixtralSparseMoeBlock(_Block):
    names = ("w1", "w3", "w2")


@pytest.mark.parametrize("kind", [Qwen3MoeSparseMoeBlock, MixtralSparseMoeBlock])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_list_of_experts(kind, dtype):
    block = kind().to(dtype)
    other = integration.replace_experts(copy.deepcopy(block))
    before, after = block.state_dict(), other.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    x = torch.randn(2, 7, 24).to(dtype)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    (y, logits), (z, other_logits) = block(xs[0]), other(xs[1])
    assert torch.equal(logits, other_logits) and close(z, y, dtype) and z.dtype == dtype
    for out in (y, z):
        out.float().square().sum().backward()
    assert close(xs[1].grad, xs[0].grad, dtype)
    for (name, a), (_, b) in zip(other.named_parameters(), block.named_parameters(), strict=True):
        wanted = torch.zeros_like(b) if b.grad is None else b.grad
        assert close(a.grad, wanted, dtype), name

    # The parameters lie in one storage, until something moves them; then they are copied.
    gates = [getattr(e, kind.names[0]).weight for e in other.experts]
    assert len({w.untyped_storage().data_ptr() for w in gates}) == 1
    gates[2].data = gates[2].data.clone()
    assert torch.equal(other(x)[0], z)
    again = copy.deepcopy(other)  # a copy has its own parameters
    with torch.no_grad():
        gates[0].zero_()
    assert torch.equal(again(x)[0], z) and not torch.equal(other(x)[0], z)


def test_what_is_refused():
    with pytest.raises(ValueError, match="no MoE block"):
        integration.replace_experts(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^model: "):
        integration.replace_experts(None)
    with pytest.raises(TypeError, match=r"^group: "):
        integration.replace_experts(MixtralSparseMoeBlock(), group="all")
    block = MixtralSparseMoeBlock()
    block.experts[3].act_fn = nn.GELU()
    with pytest.raises(ValueError, match="GELU, not SiLU"):
        integration.replace_experts(block)
    block = MixtralSparseMoeBlock()
    block.experts[3].w1 = nn.Linear(24, 10)
    with pytest.raises(ValueError, match=r"w1 is no nn.Linear without bias"):
        integration.replace_experts(block)
    assert "forward" not in vars(block)


def _block_on_ranks(rank):
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock()
    whole = {name: value.clone() for name, value in block.state_dict().items()}
    x = torch.randn(10, 24)
    want = block(x)[0]
    integration.replace_experts(block)
    mine = x[:4] if rank == 0 else x[4:]
    got = block(mine)[0]
    names = [name for name in block.state_dict() if "experts" in name]
    assert len(names) == 9 and names[0] == f"experts.{3 * rank}.w1.weight"
    gathered = integration.gather_state_dict(block)
    assert set(gathered) == set(whole)
    assert all(torch.equal(gathered[name], whole[name]) for name in whole)
    block.load_state_dict({name: value + 1 for name, value in whole.items()})
    assert torch.equal(block.experts[str(3 * rank)].w1.weight, whole[f"experts.{3 * rank}.w1.weight"] + 1)  # fmt: skip  # noqa: E501
    return want[:4] if rank == 0 else want[4:], got


def test_a_list_of_experts_over_two_ranks():
    for want, got in ranks.run(2, _block_on_ranks):
        assert close(got, want, torch.float32)


# ---- transformers itself ---------------------------------------------------------------------


def tiny(family, dtype, **sizes):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    common = {
        "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
        "head_dim": 8, "output_router_logits": True, "router_aux_loss_coef": 0.01,
    }  # fmt: skip
    inner = sizes.pop("inner", 24 if family == "qwen3_moe" else 40)
    common |= sizes
    torch.manual_seed(0)
    if family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            num_experts=8, moe_intermediate_size=inner, intermediate_size=48, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[], **common,
        )  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.MixtralConfig(num_local_experts=4, intermediate_size=inner, **common)
        model = transformers.MixtralForCausalLM(config)
    return model.to(dtype)


FAMILIES = ("qwen3_moe", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_model_computes_the_same(family, dtype):
    model = tiny(family, dtype)
    other = integration.replace_experts(copy.deepcopy(model))
    before, after = model.state_dict(), other.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.randint(0, 60, (2, 12))
    outputs = [m(input_ids=ids, labels=ids) for m in (model, other)]
    assert len(outputs[1].router_logits) == 2
    assert close(outputs[1].router_logits[0], outputs[0].router_logits[0], dtype)
    assert close(outputs[1].logits, outputs[0].logits, dtype)
    assert close(outputs[1].loss, outputs[0].loss, dtype)
    if dtype == torch.float32:  # in bf16 a token may choose other experts in the second block
        for out in outputs:
            out.loss.backward()
        for (name, a), (_, b) in zip(
            other.named_parameters(), model.named_parameters(), strict=True
        ):
            wanted = torch.zeros_like(b) if b.grad is None else b.grad
            got = torch.zeros_like(a) if a.grad is None else a.grad
            assert close(got, wanted, dtype), name


@pytest.mark.parametrize("family", FAMILIES)
def test_saving_and_loading(family, tmp_path):
    model = tiny(family, torch.bfloat16)
    other = integration.replace_experts(copy.deepcopy(model))
    model.save_pretrained(tmp_path / "model")
    other.save_pretrained(tmp_path / "other")
    ids = torch.randint(0, 60, (1, 9))
    outputs, states = [], []
    for name in ("model", "other"):
        back = type(model).from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        states.append(back.state_dict())
        with torch.no_grad():
            outputs.append(integration.replace_experts(back)(input_ids=ids).logits)
    assert list(states[0]) == list(states[1]) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(states[0][name], value) and torch.equal(states[1][name], value)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_an_experts_implementation(family):
    pytest.importorskip("transformers.integrations.moe", reason="no such interface in this version")
    model = tiny(family, torch.float32)
    ids = torch.randint(0, 60, (1, 9))
    with torch.no_grad():
        want = model(input_ids=ids).logits
        integration.register("mok")
        model.set_experts_implementation("mok")
        calls = []
        original = integration.moe
        integration.moe = lambda *a, **k: calls.append(1) or original(*a, **k)
        try:
            got = model(input_ids=ids).logits
        finally:
            integration.moe = original
    assert len(calls) == 2 and close(got, want, torch.float32)


def test_a_model_that_computes_something_else_is_refused():
    pytest.importorskip("transformers.integrations.moe", reason="no such interface in this version")
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"GptOssExperts\): "):
        integration.replace_experts(transformers.GptOssForCausalLM(config))


def _model_on_ranks(rank):
    model = tiny("mixtral", torch.float32)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(input_ids=ids[rank : rank + 1]).logits
        integration.replace_experts(model)
        got = model(input_ids=ids[rank : rank + 1]).logits
    gathered = integration.gather_state_dict(model)
    assert list(gathered) == list(whole)
    assert all(torch.equal(gathered[name], whole[name]) for name in whole)
    model.load_state_dict(whole)
    return want, got


def test_a_model_over_two_ranks():
    pytest.importorskip("transformers.integrations.moe", reason="no such interface in this version")
    for want, got in ranks.run(2, _model_on_ranks, timeout=200):
        assert close(got, want, torch.float32)


def test_mok_imports_no_transformers():
    import subprocess
    import sys

    code = "import sys, mok, mok.integrations.transformers, mok.integrations.megatron; "
    code += "assert not {'transformers', 'megatron', 'torchtitan'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
