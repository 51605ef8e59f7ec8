"""The quantisers on CUDA tensors: bit for bit those of the CPU, which tests/python/test_quantize.py
checks against PyTorch's own float8."""

import math

import mok
import pytest
import torch

SHAPES = [(128, 128), (256, 384), (2, 128, 256), (1, 1), (5, 33), (130, 95), (3, 31, 161), (0, 64)]
SPECIAL = [0.0, -0.0, 447.0, 448.0, 449.0, 464.0, 480.0, 1e4, 1e-12, 1e-13, 2.0**-133, 2.0**127,
           math.inf, -math.inf, math.nan]  # fmt: skip


def bits(t):
    return t.cpu().view(torch.uint8) if t.dtype != torch.bfloat16 else t.cpu().view(torch.int16)


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_the_cpu(shape, precision):
    quantize = getattr(mok.ops, f"{precision}_quantize")
    dequantize = getattr(mok.ops, f"{precision}_dequantize")
    g = torch.Generator().manual_seed(7)
    x = (
        torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))
    ).bfloat16()
    for start in range(0, x.numel() - len(SPECIAL), 411):
        values = torch.tensor(SPECIAL, dtype=torch.float64).bfloat16()
        x.view(-1)[start : start + len(SPECIAL)] = values
    here, there = quantize(x, True, True), quantize(x.cuda(), True, True)
    for cpu, gpu in zip(here, there, strict=True):
        assert gpu.is_cuda and gpu.shape == cpu.shape and gpu.dtype == cpu.dtype
        assert torch.equal(bits(gpu), bits(cpu))
    for i in (0, 2):
        back = dequantize(there[i], there[i + 1])
        wanted = dequantize(here[i], here[i + 1])
        assert torch.equal(torch.nan_to_num(back.cpu(), nan=3.0), torch.nan_to_num(wanted, nan=3.0))


def test_one_form_alone_a_stream_and_compile():
    x = torch.randn(256, 256, device="cuda").bfloat16()
    both = mok.ops.mxfp8_quantize(x, True, True)
    assert mok.ops.mxfp8_quantize(x, True, False)[2:] == (None, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = mok.ops.mxfp8_quantize(x * 1.0, False, True)
    stream.synchronize()
    assert torch.equal(bits(late[2]), bits(both[2])) and torch.equal(late[3], both[3])
    compiled = torch.compile(lambda t: mok.ops.mxfp8_quantize(t, True, True), fullgraph=True)
    for got, wanted in zip(compiled(x), both, strict=True):
        assert torch.equal(bits(got), bits(wanted))


def test_scales_on_another_device_are_named():
    x = torch.randn(128, 128).bfloat16()
    codes, scales, _, _ = mok.ops.mxfp8_quantize(x.cuda(), True, False)
    with pytest.raises(ValueError, match="x_sc"):
        mok.ops.mxfp8_dequantize(codes, scales.cpu())
