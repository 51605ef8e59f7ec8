"""MXFP8 bit by bit, against PyTorch's own float8_e4m3fn and scales found by search."""

import mok
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

FP8 = torch.float8_e4m3fn
INF, NAN = float("inf"), float("nan")


POWERS = 2.0 ** torch.arange(-127, 128, dtype=torch.float64)


def reference(x):
    """(codes [M, N], scales [tile rows, tile columns, 32, 16]) of [M, N] bf16; all in float64."""
    rows, columns = x.shape
    tile_rows, tile_columns = -(-rows // 128), -(-columns // 128)
    padded = torch.zeros(128 * tile_rows, 128 * tile_columns, dtype=torch.float64)
    padded[:rows, :columns] = x.double()
    blocks = padded.view(128 * tile_rows, -1, 32)
    amax = torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(-1)
    amax = amax.clamp_min(torch.tensor(1e-12, dtype=torch.float32).item())
    # The smallest power that is enough, or the largest that there is.
    code = (448.0 * POWERS < amax[..., None]).sum(-1).clamp_max(254)
    scaled = (blocks / POWERS[code][..., None]).clamp(-448.0, 448.0)  # NaN stays
    codes = torch.where(blocks.isnan(), 0x7F, scaled.to(FP8).view(torch.uint8))
    # [tile, quarter, row, tile, block] -> [tile, tile, row, quarter, block]
    scales = code.view(tile_rows, 4, 32, tile_columns, 4).permute(0, 3, 2, 1, 4)
    return (
        codes.reshape(padded.shape)[:rows, :columns],
        scales.reshape(tile_rows, tile_columns, 32, 16).to(torch.uint8),
    )


def check(x):
    """All four outputs of x [M, N] or [E, M, N], and the way back."""
    out, scales, out_t, scales_t = mok.ops.mxfp8_quantize(x, True, True)
    assert out.dtype == out_t.dtype == FP8 and scales.dtype == scales_t.dtype == torch.uint8
    assert out.shape == x.shape and out_t.shape == x.mT.shape
    for got, got_scales, of in ((out, scales, x), (out_t, scales_t, x.mT)):
        matrices = of if of.dim() == 3 else of[None]
        wanted = [reference(matrix) for matrix in matrices]
        assert torch.equal(got.view(torch.uint8).reshape(matrices.shape),
                           torch.stack([codes for codes, _ in wanted]))  # fmt: skip
        assert torch.equal(got_scales, torch.cat([scale for _, scale in wanted]))
        back = mok.ops.mxfp8_dequantize(got, got_scales)
        assert torch.equal(
            torch.nan_to_num(back.double(), nan=5.0, posinf=7.0, neginf=-7.0),
            torch.nan_to_num(
                torch.stack([by_hand(*pair) for pair in wanted])
                .to(torch.bfloat16)
                .double()
                .reshape(of.shape),
                nan=5.0, posinf=7.0, neginf=-7.0,
            ),
        )  # fmt: skip


def by_hand(codes, scales):
    """float64 [M, N]; exact."""
    rows, columns = codes.shape
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    scale = scales[r // 128, c // 128, r % 32, r % 128 // 32 * 4 + c % 128 // 32]
    return codes.view(FP8).double() * 2.0 ** (scale.double() - 127)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (2, 128, 256), (1, 1), (5, 33),
                                   (130, 95), (3, 31, 161), (2, 200, 64)], ids=str)  # fmt: skip
def test_normal_and_transposed(shape):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))
    check(x.bfloat16())


def test_empty():
    for shape in ((0, 64), (64, 0), (0, 8, 8)):
        out, scales, out_t, scales_t = mok.ops.mxfp8_quantize(
            torch.empty(shape, dtype=torch.bfloat16), True, True
        )
        assert out.shape == shape and out_t.shape == torch.empty(shape).mT.shape
        assert scales.numel() == scales_t.numel() == 0
        assert mok.ops.mxfp8_dequantize(out, scales).shape == shape


def block(*values):
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, : len(values)] = torch.tensor(values, dtype=torch.float64).bfloat16()
    return x


def quantised(*values):
    """(scale's exponent, codes of the values)."""
    check(block(*values))
    codes, scales, _, _ = mok.ops.mxfp8_quantize(block(*values), True, False)
    return scales[0, 0, 0, 0].item() - 127, codes.view(torch.uint8)[0, : len(values)].tolist()


@pytest.mark.parametrize(
    ("values", "exponent", "codes"),
    [
        ((0.0, -0.0), -48, [0x00, 0x80]),  # 1e-12 / 448 <= 2^-48
        ((448.0, -448.0, 1.0), 0, [0x7E, 0xFE, 0x38]),
        ((447.0,), 0, [0x7E]),  # bf16 has 446 and 448
        ((446.0,), 0, [0x7E]),
        ((450.0,), 1, [0x76]),  # 225 lies between 224 and 240
        ((449.0,), 0, [0x7E]),  # 448 in bf16
        ((464.0,), 1, [0x76]),  # 232, a tie: 224 is even
        ((480.0,), 1, [0x77]),  # 240
        ((1e4,), 5, [0x7A]),  # 9984 in bf16 / 32 = 312, nearer to 320
        ((2.0**127 * 1.9921875,), 120, [0x78]),  # the largest: 255 is nearer to 256
        ((1e-12,), -48, [0x79]),  # 281.5 is nearest 288
        ((1e-13,), -48, [0x5E]),  # below the floor
        ((2.0**-133, -(2.0**-126)), -48, [0x00, 0x80]),  # subnormal in bf16
        ((2.0**-57, 2.0**-58, 2.0**-58 * 1.0078125), -48, [0x01, 0x00, 0x01]),  # ties, smallest
        ((1.75, 1.75 * 2**-8 * 1.0), -8, [0x7E, 0x3E]),
        ((INF, 1.0, -INF, 2.0**127), 127, [0x7E, 0x00, 0xFE, 0x38]),
        ((NAN, -NAN, 448.0), 0, [0x7F, 0x7F, 0x7E]),  # NaN keeps to itself
        ((NAN, NAN), -48, [0x7F, 0x7F]),
        ((NAN, INF, 1.0), 127, [0x7F, 0x7E, 0x00]),
    ],
    ids=str,
)
def test_special_values(values, exponent, codes):
    assert quantised(*values) == (exponent, codes)


def test_an_infinity_comes_back_as_one():
    codes, scales, _, _ = mok.ops.mxfp8_quantize(block(INF, -INF, 1.0), True, False)
    back = mok.ops.mxfp8_dequantize(codes, scales)[0]
    assert back[:3].tolist() == [INF, -INF, 0.0]


def test_a_block_is_alone():
    """A NaN or an infinity changes its own block and no other."""
    x = torch.randn(64, 96).bfloat16()
    codes, scales, _, _ = mok.ops.mxfp8_quantize(x, True, False)
    for bad in (NAN, INF):
        y = x.clone()
        y[40, 40] = bad
        other, other_scales, _, _ = mok.ops.mxfp8_quantize(y, True, False)
        differ = (codes.view(torch.uint8) != other.view(torch.uint8)).nonzero()
        assert all(r == 40 and 32 <= c < 64 for r, c in differ.tolist())
        assert (scales != other_scales).sum() <= 1


def test_every_bf16():
    """All 65536 numbers, each alone in its block, and each beside a 1."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for beside in (0.0, 1.0):
        x = torch.zeros(65536, 2, dtype=torch.bfloat16)
        x[:, 0], x[:, 1] = every, beside
        codes, scales, _, _ = mok.ops.mxfp8_quantize(x, True, False)
        d = x.double()
        amax = torch.where(d.isnan(), 0.0, d.abs()).amax(1).clamp_min(
            torch.tensor(1e-12).double().item())  # fmt: skip
        exponent = torch.ceil(torch.log2(amax / 448.0)).clamp_max(127)
        scaled = (d / 2.0 ** exponent[:, None]).clamp(-448, 448)
        wanted = torch.where(d.isnan(), 0x7F, scaled.to(FP8).view(torch.uint8))
        assert torch.equal(codes.view(torch.uint8), wanted)
        rows = torch.arange(65536)
        got = scales[rows // 128, 0, rows % 32, rows % 128 // 32 * 4]
        assert torch.equal(got.double() - 127, exponent)


def test_dequantise_every_code_and_scale():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(FP8)  # [256, 256]
    scales = torch.empty(2, 2, 32, 16, dtype=torch.uint8)
    r = torch.arange(256)
    for b in range(8):
        scales[r // 128, b // 4, r % 32, r % 128 // 32 * 4 + b % 4] = r.to(torch.uint8)
    got = mok.ops.mxfp8_dequantize(codes, scales)
    exact = codes.double() * 2.0 ** (r.double()[:, None] - 127)
    exact[255] = NAN
    wanted = exact.float().bfloat16()  # float32 is exact here but for overflow
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(torch.nan_to_num(got, nan=0.0), torch.nan_to_num(wanted, nan=0.0))
    # Exact for the scales that quantisation gives, below 2^128.
    kept = slice(79, 255)
    finite = exact[kept].abs() < 2.0**128
    assert torch.equal(got[kept].double()[finite], exact[kept][finite])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**31), st.floats(-60, 60))
def test_random_shapes_and_sizes(rows, columns, seed, scale):
    g = torch.Generator().manual_seed(seed)
    check((torch.randn(rows, columns, generator=g) * 2.0**scale).bfloat16())


def test_what_is_returned_and_strides():
    x = torch.randn(2, 64, 128).bfloat16()
    all_four = mok.ops.mxfp8_quantize(x, True, True)
    for normal, transposed in ((True, False), (False, True), (False, False)):
        some = mok.ops.mxfp8_quantize(x, normal, transposed)
        for i, (got, want) in enumerate(zip(some, all_four, strict=True)):
            if (normal, transposed)[i // 2]:
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            else:
                assert got is None
    view = mok.ops.mxfp8_quantize(x.mT, True, True)
    assert torch.equal(view[0].view(torch.uint8), all_four[2].view(torch.uint8))
    assert torch.equal(view[3], all_four[1])
    leaf = x.clone().requires_grad_()
    assert not mok.ops.mxfp8_quantize(leaf, True, False)[0].requires_grad


def test_compiles_as_one_graph():
    def f(x):
        codes, scales, none, _ = mok.ops.mxfp8_quantize(x * 2, True, False)
        assert none is None
        return mok.ops.mxfp8_dequantize(codes, scales)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((40, 70), (129, 32)):
        x = torch.randn(shape).bfloat16()
        assert torch.equal(compiled(x), f(x))


def test_fake_kernels():
    x = torch.randn(2, 40, 130).bfloat16()
    for flags in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.mok.mxfp8_quantize, (x, *flags))
    codes, scales, _, _ = mok.ops.mxfp8_quantize(x, True, False)
    # Not the schema's check, which multiplies the inputs.
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.mok.mxfp8_dequantize, (codes, scales), test_utils=others)
    torch.library.opcheck(torch.ops.mok.routing_hash, (torch.tensor([[1, -1]]),))


def test_errors():
    x = torch.zeros(32, 32, dtype=torch.bfloat16)
    for arguments, error, name in (
        (([1.0], True, True), TypeError, "x_bf16"),
        ((x, 1, True), TypeError, "return_normal"),
        ((x, True, None), TypeError, "return_transposed"),
        ((x.float(), True, True), ValueError, "x_bf16"),
        ((x[0], True, True), ValueError, "x_bf16"),
        ((x[None, None], True, True), ValueError, "x_bf16"),
    ):
        with pytest.raises(error, match=f"^{name}: "):
            mok.ops.mxfp8_quantize(*arguments)
    codes, scales, _, _ = mok.ops.mxfp8_quantize(x, True, False)
    for arguments, error, name in (
        ((None, scales), TypeError, "x_fp8"),
        ((codes, None), TypeError, "x_sc"),
        ((x, scales), ValueError, "x_fp8"),
        ((codes, scales.int()), ValueError, "x_sc"),
        ((codes, scales[:, :, :16]), ValueError, "x_sc"),
    ):
        with pytest.raises(error, match=f"^{name}: "):
            mok.ops.mxfp8_dequantize(*arguments)
    # The operators check for themselves.
    for call in (
        lambda: torch.ops.mok.mxfp8_quantize(x.float(), True, True),
        lambda: torch.ops.mok.mxfp8_quantize(x[0], True, True),
        lambda: torch.ops.mok.mxfp8_dequantize(codes, scales[:, :, :16]),
        lambda: torch.ops.mok.mxfp8_dequantize(x, scales),
    ):
        with pytest.raises(ValueError, match=r"x_bf16|x_fp8|x_sc"):
            call()


@pytest.mark.parametrize("shape", [(64, 128), (3, 96, 160), (2, 33, 70), (0, 64)], ids=str)
def test_rounding_is_quantising_there_and_back(shape):
    x = (torch.randn(shape) * torch.exp(4 * torch.randn(shape))).bfloat16()
    codes, scales, codes_t, scales_t = mok.ops.mxfp8_quantize(x, True, True)
    along_rows, along_columns = torch.ops.mok.mxfp8_round(x, True, True)
    assert torch.equal(along_rows, mok.ops.mxfp8_dequantize(codes, scales))
    assert torch.equal(along_columns, mok.ops.mxfp8_dequantize(codes_t, scales_t).mT)
    assert torch.ops.mok.mxfp8_round(x.mT, True, False)[1] is None
    assert torch.equal(torch.ops.mok.mxfp8_round(x.mT, True, False)[0].mT, along_columns)
