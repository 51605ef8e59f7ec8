// What is particular to mxfp8 on the GPU: scales of the inputs, NaN, the weights' forms.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gpu/gradients.h"

namespace mok::testing {
namespace {

LayerSetup mxfp8_ranks(const std::vector<int64_t>& tokens) {
  LayerSetup s = virtual_ranks(tokens);
  s.options.precision = Precision::mxfp8;
  return s;
}

// The wire, h, d_g and d_u in blocks of every size, down to those that vanish; refills, both ways
// of keeping rows.
TEST(GpuMxfp8, both_directions_at_many_scales) {
  for (const int exponent : {-60, -24, -9, 9, 30}) {
    for (const bool keep : {true, false}) {
      SCOPED_TRACE("2^" + std::to_string(exponent) + (keep ? ", kept" : ", nothing kept"));
      LayerSetup s = mxfp8_ranks({61, 0, 150, 4});
      s.shape.shared_intermediate = 0;  // its products are those of bf16
      s.shape.shared_gate = false;
      s.options.workspace.ring_rows = 512;
      s.options.workspace.minibatch_rows = 128;
      s.keep = keep;
      GpuLayer layer(s);
      BackwardLayer backward(layer);
      reference::Inputs in = backward_inputs(layer);
      const auto scale = [&](bf16 v) {
        return numerics::to_bf16(std::ldexp(numerics::to_float(v), exponent));
      };
      TokenInputs tokens = TokenInputs::of(layer);
      for (bf16& v : tokens.x) v = scale(v);
      tokens.write(layer);
      for (size_t r = 0; r < s.tokens.size(); ++r) {
        const int64_t n = s.tokens[r] * s.shape.hidden;
        auto d_y = download(backward.d_y(static_cast<int>(r)), n);
        for (bf16& v : d_y) v = scale(v);
        cuda::check(
            cudaMemcpy(backward.d_y(static_cast<int>(r)), d_y.data(), n * 2, cudaMemcpyDefault),
            "d_y");
      }
      for (double& v : in.x) v = std::ldexp(v, exponent);
      for (double& v : in.d_y) v = std::ldexp(v, exponent);
      backward.expect_close(backward.run(), in);
    }
  }
}

// The bound of a whole tensor is narrow enough to see what is quantised and what is not.
TEST(GpuMxfp8, the_oracle_tells_quantised_from_plain) {
  GpuLayer layer(virtual_ranks({96}));
  const std::vector<bf16> y = layer.forward();
  const LayerShape& s = layer.setup().shape;
  const auto in = problem::oracle_inputs(layer.problem(), Precision::mxfp8, {96}, false);
  const auto d = problem::compare(y.data(), s.hidden, reference::run(in).y.data(), 96, s.hidden);
  EXPECT_GT(d.whole_err(), 2 * problem::whole_tolerances(s, Precision::mxfp8, 96).y);
}

// Forward's and backward's forms of a weight are different numbers: each is read where it should.
TEST(GpuMxfp8, what_reads_which_form) {
  GpuLayer layer(mxfp8_ranks({200, 133}));
  BackwardLayer backward(layer);
  const Results good = backward.run();
  using Form = ConstStack RoundedWeights::*;
  const auto with_nan = [&](Form form) {
    LayerWeights& w = layer.args()[0].weights;
    const auto bytes =
        static_cast<size_t>(layer.setup().shape.experts / 2 * (w.rounded.*form).expert_stride * 2);
    cuda::check(cudaMemset(const_cast<void*>((w.rounded.*form).data), 0xff, bytes), "NaN");
    Results r = backward.run();
    layer.refresh_weights();
    return r;
  };
  for (const Form form : {&RoundedWeights::gate, &RoundedWeights::up, &RoundedWeights::down}) {
    EXPECT_FALSE(same_bits(with_nan(form).y, good.y));
  }
  const Results down = with_nan(&RoundedWeights::down_backward);
  EXPECT_TRUE(same_bits(down.y, good.y));
  for (const int g : {d_x, d_topk_weights, d_gate, d_up}) EXPECT_TRUE(down.grad[g] != good.grad[g]);
  EXPECT_TRUE(down.grad[d_down] == good.grad[d_down]);
  for (const Form form : {&RoundedWeights::gate_backward, &RoundedWeights::up_backward}) {
    const Results r = with_nan(form);
    EXPECT_TRUE(r.grad[d_x] != good.grad[d_x]);
    for (const int g : {d_topk_weights, d_gate, d_up, d_down}) {
      EXPECT_TRUE(r.grad[g] == good.grad[g]) << kGradNames[g];
    }
  }
  expect_same_bits(good, backward.run(), "afterwards");
}

TEST(GpuMxfp8, bad_arguments_are_named) {
  GpuLayer layer(mxfp8_ranks({50, 60}));
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
  EXPECT_EQ(
      text(ErrorCode::bad_argument, [&] { layer.workspace().forward(forward, layer.streams()); }),
      "weights.rounded.down is null (rank 1)");
  auto args = backward.args();
  args[0].weights.rounded.gate_backward.data = nullptr;
  EXPECT_EQ(
      text(ErrorCode::bad_argument, [&] { layer.workspace().backward(args, layer.streams()); }),
      "weights.rounded.gate_backward is null (rank 0)");
  args = backward.args();
  args[1].weights.rounded.up.row_stride = 64;
  EXPECT_NE(
      text(ErrorCode::bad_argument, [&] { layer.workspace().backward(args, layer.streams()); })
          .find("weights.rounded.up.row_stride"),
      std::string::npos);
  expect_same_bits(good, backward.run(), "after bad arguments");
  for (const Precision p : {Precision::fp8, Precision::fp32, Precision::fp64}) {
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
