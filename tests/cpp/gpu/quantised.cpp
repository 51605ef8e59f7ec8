// What is particular to quantised precisions on the GPU: scales of the inputs, the weights' forms.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "gpu/gradients.h"

namespace mok::testing {
namespace {

class GpuQuantised : public InEachPrecision {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuQuantised, ::testing::Values(Precision::mxfp8, Precision::fp8),
                         precision_name);

// The wire, h, d_g and d_u in blocks of every size, down to those that vanish; refills, both ways
// of keeping rows.
TEST_P(GpuQuantised, both_directions_at_many_scales) {
  for (const int exponent : {-60, -24, -9, 9, 30}) {
    for (const bool keep : {true, false}) {
      SCOPED_TRACE("2^" + std::to_string(exponent) + (keep ? ", kept" : ", nothing kept"));
      LayerSetup s = virtual_ranks({61, 0, 150, 4});
      s.shape.shared_intermediate = 0;  // its products are those of bf16
      s.shape.shared_gate = false;
      s.options.workspace.ring_rows = 512;
      s.options.workspace.minibatch_rows = 128;
      s.keep = keep;
      GpuLayer layer(s);
      BackwardLayer backward(layer);
      reference::Inputs in = backward_inputs(layer);
      // Sums by FP8 tensor cores err by 2^-13 of the usual g, which at 2^30 is far more than the
      // 1 over which silu'(g) goes from 0 to 1: no tolerance covers that.
      const int of_x = GetParam() == Precision::fp8 ? std::min(exponent, 9) : exponent;
      const auto scale = [&](bf16 v, int by) {
        return numerics::to_bf16(std::ldexp(numerics::to_float(v), by));
      };
      TokenInputs tokens = TokenInputs::of(layer);
      for (bf16& v : tokens.x) v = scale(v, of_x);
      tokens.write(layer);
      for (size_t r = 0; r < s.tokens.size(); ++r) {
        const int64_t n = s.tokens[r] * s.shape.hidden;
        auto d_y = download(backward.d_y(static_cast<int>(r)), n);
        for (bf16& v : d_y) v = scale(v, exponent);
        cuda::check(
            cudaMemcpy(backward.d_y(static_cast<int>(r)), d_y.data(), n * 2, cudaMemcpyDefault),
            "d_y");
      }
      for (double& v : in.x) v = std::ldexp(v, of_x);
      for (double& v : in.d_y) v = std::ldexp(v, exponent);
      backward.expect_close(backward.run(), in);
    }
  }
}

// The bound of a whole tensor is narrow enough to see what is quantised and what is not.
TEST_P(GpuQuantised, the_oracle_tells_quantised_from_plain) {
  GpuLayer layer(testing::virtual_ranks({96}));
  const std::vector<bf16> y = layer.forward();
  const LayerShape& s = layer.setup().shape;
  const auto in = problem::oracle_inputs(layer.problem(), GetParam(), {96}, false);
  const auto d = problem::compare(y.data(), s.hidden, reference::run(in).y.data(), 96, s.hidden);
  EXPECT_GT(d.whole_err(),
            (GetParam() == Precision::fp8 ? 1 : 2) * whole_tolerances(s, GetParam(), 96).y);
}

// Forward's and backward's forms of a weight: each is read where it should.
TEST_P(GpuQuantised, what_reads_which_form) {
  GpuLayer layer(virtual_ranks({200, 133}));
  BackwardLayer backward(layer);
  const Results good = backward.run();
  const LayerShape& shape = layer.setup().shape;
  const int64_t elements = shape.experts / 2 * shape.hidden * shape.intermediate;
  const bool fp8 = GetParam() == Precision::fp8;
  const auto& [quantized, rounded] =
      std::tie(layer.args()[0].weights.quantized, layer.args()[0].weights.rounded);
  const auto with_nan = [&](const QuantizedStack& codes, const ConstStack& bf16_form) {
    const void* form = fp8 ? codes.data : bf16_form.data;
    cuda::check(cudaMemset(const_cast<void*>(form), 0xff, elements * (fp8 ? 1 : 2)), "NaN");
    Results r = backward.run();
    layer.refresh_weights();
    return r;
  };
  EXPECT_FALSE(same_bits(with_nan(quantized.gate, rounded.gate).y, good.y));
  EXPECT_FALSE(same_bits(with_nan(quantized.up, rounded.up).y, good.y));
  EXPECT_FALSE(same_bits(with_nan(quantized.down, rounded.down).y, good.y));
  const Results down = with_nan(quantized.down_t, rounded.down_backward);
  EXPECT_TRUE(same_bits(down.y, good.y));
  for (const int g : {d_x, d_topk_weights, d_gate, d_up}) EXPECT_TRUE(down.grad[g] != good.grad[g]);
  EXPECT_TRUE(down.grad[d_down] == good.grad[d_down]);
  for (const Results& r : {with_nan(quantized.gate_t, rounded.gate_backward),
                           with_nan(quantized.up_t, rounded.up_backward)}) {
    EXPECT_TRUE(r.grad[d_x] != good.grad[d_x]);
    for (const int g : {d_topk_weights, d_gate, d_up, d_down}) {
      EXPECT_TRUE(r.grad[g] == good.grad[g]) << kGradNames[g];
    }
  }
  expect_same_bits(good, backward.run(), "afterwards");
}

TEST_P(GpuQuantised, bad_arguments_are_named) {
  GpuLayer layer(virtual_ranks({50, 60}));
  const bool fp8 = GetParam() == Precision::fp8;
  const std::string forms = fp8 ? "weights.quantized." : "weights.rounded.";
  BackwardLayer backward(layer);
  const Results good = backward.run();
  const auto text = [](ErrorCode code, auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      return e.what();
    }
    return "no error";
  };
  // bf16 weights are not looked at, and may be null.
  for (ForwardArgs& a : layer.args()) a.weights.gate = a.weights.up = a.weights.down = {};
  auto forward = layer.args();
  forward[1].weights.rounded.down.data = nullptr;
  forward[1].weights.quantized.down.data = nullptr;
  EXPECT_EQ(
      text(ErrorCode::bad_argument, [&] { layer.workspace().forward(forward, layer.streams()); }),
      forms + (fp8 ? "down.data" : "down") + " is null (rank 1)");
  auto args = backward.args();
  args[0].weights.rounded.gate_backward.data = nullptr;
  args[0].weights.quantized.gate_t.scales = nullptr;
  EXPECT_EQ(
      text(ErrorCode::bad_argument, [&] { layer.workspace().backward(args, layer.streams()); }),
      forms + (fp8 ? "gate_t.scales" : "gate_backward") + " is null (rank 0)");
  args = backward.args();
  args[1].weights.rounded.up.row_stride = 64;
  args[1].weights.quantized.up.data =
      static_cast<const char*>(args[1].weights.quantized.up.data) + 8;
  EXPECT_NE(
      text(ErrorCode::bad_argument, [&] { layer.workspace().backward(args, layer.streams()); })
          .find(forms + (fp8 ? "up.data must be aligned" : "up.row_stride")),
      std::string::npos);
  expect_same_bits(good, backward.run(), "after bad arguments");
  cuda::Options crowded;
  crowded.precision = GetParam();
  const std::vector<int> one_gpu(cuda::most_ranks_of_a_gpu(GetParam()) + 1, 0);
  EXPECT_NE(text(fp8 ? ErrorCode::unsupported : ErrorCode::bad_argument,
                 [&] {
                   const int experts = static_cast<int>(one_gpu.size());
                   cuda::Workspace(shape_of(128, 128, experts, 2), one_gpu, crowded);
                 })
                .find("ranks"),
            std::string::npos);
  for (const Precision p : {Precision::fp32, Precision::fp64}) {
    cuda::Options o;
    o.precision = p;
    EXPECT_NE(text(ErrorCode::unsupported,
                   [&] { cuda::Workspace(shape_of(128, 128, 4, 2), std::vector<int>{0}, o); })
                  .find("precision"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace mok::testing
