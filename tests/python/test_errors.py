"""Bad input is an error that names the argument; nothing is written; the next good call works."""

import dataclasses
import inspect

import mok
import pytest
import torch
from problems import assert_same_bits, leaves, problem, run
from torch.testing import make_tensor


def good():
    return problem(1, shared=4, shared_gate=True, dtype=torch.bfloat16)


NAMES = ("x", "topk_ids", "topk_weights", "w_gate", "w_up", "w_down", "w_shared_gate",
         "w_shared_up", "w_shared_down", "shared_gate_vector")  # fmt: skip


def arguments(p):
    return dict(zip(NAMES, (p.x, p.ids, p.topk_weights, *p.weights.each()), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_type_dtype_shape_and_device_of_each_tensor(name):
    p = good()
    want = run(p)
    tensor = arguments(p)[name]
    other_dtype = torch.float32 if tensor.dtype == torch.bfloat16 else torch.bfloat16
    for value, error in (
        ([1.0], TypeError),
        (tensor.to(other_dtype), TypeError),
        (tensor.to(torch.float16), TypeError),
        (torch.cat([tensor, tensor]), ValueError),
        (tensor[..., :-1], ValueError),
        (tensor[0], ValueError),
        (tensor.to("meta"), ValueError),
    ):
        # Those that say what T, H, I and K are: another may be named that then does not fit.
        deciding = name in ("x", "w_down", "topk_ids", "w_shared_down")
        also = "|topk_ids|topk_weights|w_gate|w_up|w_shared_gate|x" if deciding else ""
        with pytest.raises(error, match=rf"^(mok \[\w+ \w+\]: )?({name}{also})\b"):
            mok.moe(**{**arguments(p), name: value})
        assert_same_bits(run(p), want)


def test_shared_expert_is_three_tensors():
    p = good()
    for missing in ("w_shared_gate", "w_shared_up", "w_shared_down"):
        with pytest.raises(ValueError, match="w_shared_gate, w_shared_up, w_shared_down"):
            mok.moe(**{**arguments(p), missing: None})
    with pytest.raises(ValueError, match="shared_gate_vector"):
        mok.moe(**{**arguments(p), **dict.fromkeys(NAMES[6:9])})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("hidden", 0, ValueError),
        ("hidden", 8.0, TypeError),
        ("intermediate", -1, ValueError),
        ("experts", "4", TypeError),
        ("topk", 5, ValueError),
        ("shared_intermediate", None, TypeError),
        ("swiglu_limit", 0.0, ValueError),
        ("swiglu_limit", float("nan"), ValueError),
        ("router", "sigmoid", TypeError),
        ("layout", "fused", ValueError),
        ("dtype", torch.float16, TypeError),
        ("shared_intermediate", -1, ValueError),
        ("shared_gate", True, ValueError),
        ("device", "nowhere", ValueError),
    ],
)
def test_settings_of_the_layer(name, value, error):
    with pytest.raises(error, match=rf"^{name}: "):
        mok.MoELayer(**{**LAYER, name: value})


LAYER = {"hidden": 8, "intermediate": 8, "experts": 4, "topk": 2}
NOTHING = object()  # of no type that anything takes


@pytest.mark.parametrize("value", [NOTHING, [1], "a", 1.5, True], ids=str)
@pytest.mark.parametrize("name", list(inspect.signature(mok.MoELayer).parameters))
def test_type_of_each_setting_of_the_layer(name, value):
    right = {
        "layout": str, "device": str, "precision": str, "swiglu_limit": float, "shared_gate": bool,
        "accumulate_into_main_grad": bool,
    }.get(name, type(None))  # fmt: skip
    if type(value) is right:
        return
    with pytest.raises(TypeError, match=rf"^{name}: "):
        mok.MoELayer(**{**LAYER, name: value})


GROUP = ("process_group", "max_tokens", "arrival_timeout", "progress_timeout", "options")


@pytest.mark.parametrize("value", [NOTHING, [1], "a", 1.5, True], ids=str)
@pytest.mark.parametrize("name", GROUP)
def test_type_of_each_setting_of_a_group(name, value):
    assert tuple(inspect.signature(mok.new_group).parameters) == GROUP
    if name.endswith("timeout") and type(value) is float:
        return
    makers = [mok.init, mok.new_group]
    if name in inspect.signature(mok.local_group).parameters:
        makers.append(mok.local_group)
    for make in makers:
        with pytest.raises(TypeError, match=rf"^{name}: "):
            make(**{name: value})
    if name == "max_tokens":
        with pytest.raises(TypeError, match=r"^max_tokens: "):
            mok.local_group().reserve(value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(mok.Options)])
def test_each_option(name):
    for value in (NOTHING, None, "a", 1.5, True):
        with pytest.raises(TypeError, match=rf"^{name}: "):
            mok.Options(**{name: value})
    with pytest.raises(ValueError, match=rf"^{name}: "):
        mok.Options(**{name: -2})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(mok.RouterConfig)])
def test_type_of_each_setting_of_a_router(name):
    wrong = [NOTHING, None, [1]]
    if type(getattr(mok.RouterConfig(), name)) is not bool:
        wrong.append(True)
    for value in wrong:
        with pytest.raises(TypeError, match=rf"^{name}: "):
            mok.MoELayer(**LAYER, router=mok.RouterConfig(**{name: value}))


def test_values_of_a_group():
    for name in ("arrival_timeout", "progress_timeout"):
        for value in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=rf"^{name}: "):
                mok.init(**{name: value})
    with pytest.raises(TypeError, match=r"^group: "):
        mok.reserve(4, group="all")
    with pytest.raises(TypeError, match=r"^name: "):
        mok.MoELayer.from_preset(["mixtral-8x7b"])


def test_x_of_the_layer():
    layer = mok.MoELayer(8, 8, 4, 2)
    x = torch.ones(3, 8)
    want = layer(x)
    for value, error in (
        (None, TypeError),
        ([1.0], TypeError),
        (torch.tensor(1.0), ValueError),
        (x[:, :-1], ValueError),
        (x.to("meta"), ValueError),
        (x.double(), TypeError),
    ):
        with pytest.raises(error, match=r"^x\b"):
            layer(value)
    assert torch.equal(layer(x), want)


@pytest.mark.parametrize("bad", [6, 2**30, -2, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_M3_ids_out_of_range(bad, dtype):
    p = good()
    want = run(p)
    p.ids = p.ids.to(dtype)
    kept = p.ids[3, 1].clone()
    p.ids[3, 1] = bad
    with pytest.raises(ValueError, match=rf"topk_ids.*token 3.*slot 1.*{bad}"):
        run(p)
    p.ids[3, 1] = kept
    assert_same_bits(run(p), want)


def test_M1_minus_one_drops_a_slot():
    p = problem(2, tokens=3, experts=4, dtype=torch.float64)
    p.ids = torch.tensor([[0, -1], [-1, -1], [3, 2]])
    p.topk_weights[0, 1] = float("nan")  # without effect
    y, d_x, d_w, grads = run(p)
    assert (y[1] == 0).all() and (d_x[1] == 0).all()
    assert not d_w[p.ids == -1].view(torch.int64).any()  # +0
    assert all(t.isfinite().all() for t in (y, d_x, d_w, *grads.each()[:3]))
    assert not grads.gate[1].view(torch.int64).any()


def test_nan_reaches_only_its_own_token():
    p = problem(3, dropped=0, dtype=torch.bfloat16)
    want = run(p)
    p.x[4] = float("nan")
    y, d_x, d_w, grads = run(p)
    others = torch.arange(p.x.shape[0]) != 4
    for got, good in ((y, want[0]), (d_x, want[1]), (d_w, want[2])):
        assert got[4].isnan().any() and torch.equal(got[others], good[others])
    hit = set(p.ids[4].tolist())
    for e in range(p.experts):
        assert grads.gate[e].isnan().any() == (e in hit)
        if e not in hit:
            assert torch.equal(grads.down[e], want[3].down[e])


def test_beyond_max_tokens():
    group = mok.new_group(max_tokens=8)
    p = problem(4, tokens=9)
    with pytest.raises(ValueError, match=r"^x: 9 tokens, but max_tokens is 8.*mok.reserve"):
        run(p, group)
    group.reserve(9)
    assert_same_bits(run(p, group), run(p))
    group.reserve(4)  # never shrinks
    assert group.max_tokens == 9
    with pytest.raises(ValueError, match="max_tokens: -1 is negative"):
        group.reserve(-1)


def test_a_backward_across_reserve_is_an_error():
    group = mok.new_group(max_tokens=32)
    p = problem(5)
    tensors = leaves(p)
    y = mok.moe(tensors[0], p.ids, tensors[1], *tensors[2:], group=group)
    group.reserve(64)
    with pytest.raises(ValueError, match="workspace: no such handle"):
        y.sum().backward()
    run(p, group)


def test_group_settings():
    with pytest.raises(ValueError, match=r"^max_tokens: -1 is negative"):
        mok.new_group(max_tokens=-1)
    with pytest.raises(ValueError, match="swiglu_limit"):
        mok.moe(**arguments(good()), swiglu_limit=-1.0)
    with pytest.raises(TypeError, match="cannot be pickled"):
        import pickle

        pickle.dumps(mok.new_group())


def test_operators_check_for_themselves():
    """Called directly, without mok.moe's checks, they refuse what would read out of bounds."""
    p = good()
    a = list(arguments(p).values())
    group = mok.new_group(max_tokens=64)
    run(p, group)
    ((handle, saved_rows, _),) = group._workspaces.values()

    def forward(tensors, workspace=handle, saved=0, layout=0, fp8=()):
        return torch.ops.mok.forward(*tensors, *(None,) * 7, workspace, saved, layout, list(fp8))

    outputs = forward(a, saved=saved_rows)
    for i, name in enumerate(NAMES):
        for value in (a[i][..., :-1], a[i].half()):
            with pytest.raises(ValueError, match=name):
                forward([*a[:i], value, *a[i + 1 :]])
    for arguments_, name in (
        ({"workspace": 10**6}, "workspace"),
        ({"saved": saved_rows + 1}, "saved_rows"),
        ({"saved": -1}, "saved_rows"),
        ({"layout": 3}, "layout"),
        ({"layout": 1}, "w_gate|w_up"),
        ({"fp8": [a[0]]}, "quantized"),
    ):
        with pytest.raises(ValueError, match=name):
            forward(a, **arguments_)
    backward = [p.d_y, *a, *outputs[1:], handle, 0, 511, None]
    assert len(torch.ops.mok.backward(*backward)) == 9
    for i, name in ((0, "d_y"), (12, "saved")):
        with pytest.raises(ValueError, match=name):
            torch.ops.mok.backward(*backward[:i], backward[i][..., :-1], *backward[i + 1 :])
    with pytest.raises(ValueError, match="not those of the forward pass"):
        torch.ops.mok.backward(*backward[:11], outputs[1] + 1, *backward[12:])
    main = make_tensor(a[3].shape[1:], dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="main_grad"):
        torch.ops.mok.backward_accumulate(*backward, main, *(None,) * 6)
    assert_same_bits(run(p, group), run(p))
