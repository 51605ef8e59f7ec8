"""Scores, the choice of experts, weights, counts and balancing losses against plain loops."""

import math

import mok
import pytest
import torch
from mok.models import PRESETS
from mok.router import SCORINGS


def plain_scores(row, scoring):
    if scoring == "softmax":
        top = max(row)
        e = [math.exp(v - top) for v in row]
        return [v / sum(e) for v in e]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in row]
    return [math.sqrt(math.log1p(math.exp(v))) for v in row]


def plain_route(row, topk, config, bias):
    """(ids, weights) of one token, by selection sort."""
    scores = plain_scores(row, config.scoring)
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    allowed = set(range(len(row)))
    if config.groups > 1:
        width = len(row) // config.groups
        group_score = []
        for g in range(config.groups):
            members = sorted(choice[g * width : (g + 1) * width], reverse=True)
            group_score.append(sum(members[:2]) if config.group_score == "top2" else members[0])
        taken = sorted(range(config.groups), key=lambda g: (-group_score[g], g))
        allowed = {
            e for g in taken[: config.topk_groups] for e in range(g * width, (g + 1) * width)
        }
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[:topk]
    weights = [scores[e] for e in ids]
    if config.renormalise:
        total = sum(weights)
        weights = [w / total for w in weights]
    return ids, [w * config.scale for w in weights]


CONFIGS = [
    *(
        mok.RouterConfig(scoring, renormalise, 2.5)
        for scoring in SCORINGS
        for renormalise in (True, False)
    ),
    mok.RouterConfig("sigmoid", True, 1.5, 4, 2, bias=True),
    mok.RouterConfig("softmax", True, 1.0, 3, 1, "max", bias=True),
    mok.RouterConfig("sqrt_softplus", True, 1.0, 12, 7),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_against_plain_loops(config):
    for seed in range(5):
        print(f"seed {seed}")
        g = torch.Generator().manual_seed(seed)
        logits = torch.randn(17, 12, generator=g, dtype=torch.float64) * 2
        bias = torch.randn(12, generator=g, dtype=torch.float64) * 0.3 * config.bias
        ids, weights, scores = mok.route(logits, 3, config, bias=bias if config.bias else None)
        assert ids.dtype == torch.int64 and weights.dtype == scores.dtype == torch.float64
        for t, row in enumerate(logits.tolist()):
            want_ids, want_weights = plain_route(row, 3, config, bias.tolist())
            assert ids[t].tolist() == want_ids
            torch.testing.assert_close(weights[t], torch.tensor(want_weights, dtype=torch.float64))
            torch.testing.assert_close(
                scores[t], torch.tensor(plain_scores(row, config.scoring), dtype=torch.float64)
            )


def test_scores_are_fp32_whatever_the_logits_are():
    logits = torch.randn(5, 8).bfloat16()
    ids, weights, scores = mok.route(logits, 2)
    again = mok.route(logits.float(), 2)
    assert weights.dtype == scores.dtype == torch.float32
    assert torch.equal(ids, again[0]) and torch.equal(weights, again[1])


@pytest.mark.parametrize("scoring", SCORINGS)
def test_M4_rows_of_nan_and_infinity_give_valid_distinct_ids(scoring):
    nan, inf = math.nan, math.inf
    logits = torch.randn(8, 128)
    logits[0] = nan
    logits[1, 77] = nan
    logits[2] = -inf
    logits[3] = inf
    logits[4] = 0.5
    logits[5, ::2] = nan
    logits[6, 3], logits[6, 5] = inf, -inf
    for config in (
        mok.RouterConfig(scoring),
        mok.RouterConfig(scoring, groups=8, topk_groups=4),
        mok.RouterConfig(scoring, groups=64, topk_groups=8),
    ):
        ids, weights, _ = mok.route(logits, 8, config)
        assert ids.min() >= 0 and ids.max() < 128
        assert all(len(set(row)) == 8 for row in ids.tolist())
        assert weights[7].isfinite().all()
    assert mok.route(logits, 8, mok.RouterConfig(scoring))[0][4].tolist() == list(range(8))


def test_R3_equal_scores_go_to_the_lower_index():
    ids, weights, _ = mok.route(torch.zeros(3, 8), 2)
    assert ids.tolist() == [[0, 1]] * 3 and weights.tolist() == [[0.5, 0.5]] * 3
    # Ties at the cut, of bf16 logits: 5 is best, then 1, 3 and 6 are equal.
    row = torch.tensor([[0.0, 1.0, -1.0, 1.0, 0.5, 2.0, 1.0, 0.0]]).bfloat16()
    assert mok.route(row, 3)[0].tolist() == [[5, 1, 3]]
    assert mok.route(row, 4)[0].tolist() == [[5, 1, 3, 6]]
    assert mok.route(torch.tensor([[-0.0, 0.0, -0.0]]), 2)[0].tolist() == [[0, 1]]
    grouped = mok.RouterConfig("sigmoid", groups=4, topk_groups=2)
    assert mok.route(torch.zeros(1, 8), 4, grouped)[0].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("experts", [3, 5, 60, 257, 513, 1025])
def test_S7_any_number_of_experts(experts):
    topk = min(10, experts)
    logits = torch.zeros(2, experts)
    best = torch.arange(experts - 1, experts - 1 - topk, -1)
    logits[:, best] = torch.linspace(3, 2, topk)
    assert mok.route(logits, topk)[0].tolist() == [best.tolist()] * 2


def test_bias_decides_the_choice_only():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    ids, weights, scores = mok.route(
        logits, 2, mok.RouterConfig("sigmoid", renormalise=False, bias=True), bias=bias
    )
    assert ids.tolist() == [[3, 0]]
    assert torch.equal(weights, scores.gather(1, ids))


def test_G4_one_renormalised_expert_teaches_the_router_nothing():
    for renormalise, silent in ((True, True), (False, False)):
        logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        _, weights, _ = mok.route(logits, 1, mok.RouterConfig(renormalise=renormalise))
        weights.sum().backward()
        assert (logits.grad.abs().max() < 1e-12) == silent
        if renormalise:
            assert torch.equal(weights, torch.ones(4, 1, dtype=torch.float64))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gradient_of_weights_and_scores(config):
    logits = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(12) if config.bias else None
    assert torch.autograd.gradcheck(lambda v: mok.route(v, 3, config, bias=bias)[1:], (logits,))


def test_M6_masked_tokens_go_nowhere_and_count_nowhere():
    logits = torch.randn(6, 3, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False, True])
    with torch.no_grad():
        logits[1] = math.nan
    ids, weights, scores = mok.route(logits, 2, token_mask=mask)
    assert (ids[~mask] == -1).all() and (weights[~mask] == 0).all() and (ids[mask] >= 0).all()
    counts = mok.expert_counts(ids, 3)
    assert counts.tolist() == torch.bincount(ids[mask].flatten(), minlength=3).tolist()
    assert counts.sum() == 8
    loss = mok.load_balancing_loss(scores, counts, mask) + mok.router_z_loss(logits, mask)
    (loss + weights.sum()).backward()
    assert loss.isfinite() and logits.grad.isfinite().all() and (logits.grad[~mask] == 0).all()
    # Unequal numbers of valid tokens in micro-batches: the same as one batch.
    parts = [mok.expert_counts(ids[:2], 3), mok.expert_counts(ids[2:], 3)]
    assert torch.equal(sum(parts), counts)


def test_M5_duplicates_count_each_slot():
    ids = torch.tensor([[0, 1]] * 7 + [[1, 1]] * 3)
    assert mok.expert_counts(ids, 4).tolist() == [7, 13, 0, 0]


def test_losses():
    scores = torch.full((8, 4), 0.25)
    assert mok.load_balancing_loss(scores, torch.tensor([2, 2, 2, 2])) == 1
    peaked = torch.eye(4)[[0] * 8]
    assert mok.load_balancing_loss(peaked, torch.tensor([8, 0, 0, 0])) == 4
    assert mok.load_balancing_loss(scores[:0], torch.zeros(4, dtype=torch.int64)) == 0
    logits = torch.randn(5, 4)
    torch.testing.assert_close(mok.router_z_loss(logits), logits.exp().sum(1).log().square().mean())


def test_bad_arguments_are_named():
    good = torch.zeros(2, 8)
    for error, name, call in (
        (TypeError, "logits", lambda: mok.route([[0.0]], 1)),
        (TypeError, "logits", lambda: mok.route(good.long(), 1)),
        (ValueError, "logits", lambda: mok.route(good[0], 1)),
        (ValueError, "topk", lambda: mok.route(good, 9)),
        (ValueError, "topk", lambda: mok.route(good, 0)),
        (ValueError, "topk", lambda: mok.route(good, 5, mok.RouterConfig(groups=2))),
        (ValueError, "scoring", lambda: mok.route(good, 1, mok.RouterConfig("relu"))),
        (ValueError, "groups", lambda: mok.route(good, 1, mok.RouterConfig(groups=3))),
        (ValueError, "topk_groups", lambda: mok.route(good, 1, mok.RouterConfig(topk_groups=2))),
        (ValueError, "group_score", lambda: mok.route(good, 1, mok.RouterConfig(group_score="x"))),
        (ValueError, "bias", lambda: mok.route(good, 1, bias=torch.zeros(7))),
        (TypeError, "token_mask", lambda: mok.route(good, 1, token_mask=torch.ones(2))),
        (ValueError, "token_mask", lambda: mok.route(good, 1, token_mask=torch.ones(3) > 0)),
    ):
        with pytest.raises(error, match=f"^{name}"):
            call()


def test_presets_are_those_of_the_cli():
    """H, I, E, K of src/problem/models.cpp."""
    import re
    from pathlib import Path

    text = (Path(__file__).resolve().parents[2] / "src/problem/models.cpp").read_text()
    found = re.findall(r'\{"([\w.-]+)",\s*shape\(([^()]*)\)', text)
    assert {name for name, _ in found} == set(PRESETS)
    for name, numbers in found:
        p = PRESETS[name]
        values = [n.strip() for n in numbers.split(",")]
        assert [int(n) for n in values[:4]] == [p.hidden, p.intermediate, p.experts, p.topk], name
        assert int(values[4] if len(values) > 4 else 0) == p.shared_intermediate, name
        assert (len(values) > 5 and values[5] == "true") == p.shared_gate, name
        assert (float(values[6]) if len(values) > 6 else None) == p.swiglu_limit, name
        p.router.check(p.experts, p.topk)
