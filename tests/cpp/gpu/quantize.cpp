// FP8 conversions on the device against those on the host, bit for bit; and their speed.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/check.h"
#include "cuda/quantize.h"
#include "numerics/blocks.h"

namespace mok::testing {
namespace {

using numerics::bf16;
using numerics::e4m3;
using numerics::e8m0;

const char* name(Precision p) { return p == Precision::mxfp8 ? "mxfp8" : "fp8"; }

// Device memory, filled with garbage or from the host.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : n_(n) {
    cuda::check(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<int64_t>(1, n) * sizeof(T)),
                "memory");
    cuda::check(cudaMemset(data_, 0xa5, n * sizeof(T)), "garbage");
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(static_cast<int64_t>(v.size())) {
    cuda::check(cudaMemcpy(data_, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "to");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> v(n_);
    cuda::check(cudaMemcpy(v.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "from");
    return v;
  }

 private:
  T* data_ = nullptr;
  int64_t n_;
};

// Every bf16 number by turns, then normal sizes; blocks of zeros between.
std::vector<bf16> values(int64_t n) {
  std::vector<bf16> v(n);
  uint32_t state = 1;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    const uint32_t near_one = 0x3c00u + (state >> 20) % 0x400u;
    const uint32_t any = static_cast<uint32_t>(i * 40503u);
    const int64_t kind = i / 4096 % 4;
    v[i] = bf16{static_cast<uint16_t>(kind == 0   ? any
                                      : kind == 3 ? 0u
                                                  : near_one | (state >> 16 & 0x8000u))};
  }
  return v;
}

void expect_same(const std::vector<uint8_t>& got, const std::vector<uint8_t>& wanted,
                 const char* what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  const auto [a, b] = std::mismatch(got.begin(), got.end(), wanted.begin());
  ASSERT_TRUE(a == got.end()) << what << ": byte " << a - got.begin() << " of " << got.size()
                              << " is " << int{*a} << ", not " << int{*b};
}

bool is_nan(bf16 v) { return (v.bits & 0x7fff) > 0x7f80; }

struct Shape {
  int64_t count, rows, columns, row_stride;
};

class Convert : public ::testing::TestWithParam<Precision> {};
INSTANTIATE_TEST_SUITE_P(Quantize, Convert, ::testing::Values(Precision::mxfp8, Precision::fp8),
                         [](const auto& p) { return name(p.param); });

TEST_P(Convert, WeightsHaveTheHostsBits) {
  const Precision p = GetParam();
  for (const Shape& s : std::vector<Shape>{{1, 128, 128, 128},
                                           {3, 256, 384, 384},
                                           {2, 208, 336, 352},
                                           {2, 512, 64, 64},
                                           {1, 1, 1, 1},
                                           {2, 130, 95, 97},
                                           {1, 33, 513, 520},
                                           {2, 96, 160, 168},
                                           {1, 1024, 1024, 1024}}) {
    const int64_t apart = s.rows * s.row_stride + 16, size = s.rows * s.columns;
    const std::vector<bf16> x = values(s.count * apart);
    std::vector<uint8_t> data(s.count * size), data_t(data.size());
    std::vector<uint8_t> scales(s.count * scale_bytes(p, s.rows, s.columns));
    std::vector<uint8_t> scales_t(s.count * scale_bytes(p, s.columns, s.rows));
    quantize_weights(p, {x.data(), apart, s.row_stride}, s.count, s.rows, s.columns,
                     {data.data(), scales.data(), data_t.data(), scales_t.data()});

    const Buffer<bf16> on_device(x);
    const ConstStack stack{on_device.data(), apart, s.row_stride};
    for (const int forms : {1, 2, 3}) {
      const Buffer<uint8_t> d(data.size()), sc(scales.size()), dt(data.size()), st(scales_t.size());
      QuantizedTarget target;
      if (forms & 1) target.data = d.data(), target.scales = sc.data();
      if (forms & 2) target.data_t = dt.data(), target.scales_t = st.data();
      cuda::quantize_weights(p, stack, s.count, s.rows, s.columns, target, nullptr);
      SCOPED_TRACE(std::to_string(s.rows) + " x " + std::to_string(s.columns));
      if (forms & 1) {
        expect_same(d.host(), data, "data");
        expect_same(sc.host(), scales, "scales");
      }
      if (forms & 2) {
        expect_same(dt.host(), data_t, "data_t");
        expect_same(st.host(), scales_t, "scales_t");
      }
    }

    // And back; the transposed form in the weights' own layout.
    std::vector<bf16> wanted(s.count * size), wanted_t(wanted.size());
    dequantize_weights(p, data.data(), scales.data(), s.count, s.rows, s.columns, wanted.data());
    dequantize_weights(p, data_t.data(), scales_t.data(), s.count, s.columns, s.rows,
                       wanted_t.data());
    const Buffer<uint8_t> d(data), sc(scales), dt(data_t), st(scales_t);
    const Buffer<bf16> out(s.count * size), out_t(s.count * size);
    cuda::dequantize_weights(p, d.data(), sc.data(), s.count, s.rows, s.columns, out.data(), false,
                             nullptr);
    cuda::dequantize_weights(p, dt.data(), st.data(), s.count, s.columns, s.rows, out_t.data(),
                             true, nullptr);
    const std::vector<bf16> back = out.host(), back_t = out_t.host();
    for (int64_t i = 0; i < s.count * size; ++i) {
      const int64_t e = i / size, r = i % size / s.columns, c = i % s.columns;
      const bf16 turned = wanted_t[e * size + c * s.rows + r];
      ASSERT_TRUE(back[i].bits == wanted[i].bits || (is_nan(back[i]) && is_nan(wanted[i]))) << i;
      ASSERT_TRUE(back_t[i].bits == turned.bits || (is_nan(back_t[i]) && is_nan(turned))) << i;
    }
    if (p != Precision::mxfp8 || s.rows % 32 != 0 || s.columns % 32 != 0) continue;
    for (const int forms : {1, 2, 3}) {  // there and back in one
      const Buffer<bf16> rows(s.count * size), columns(s.count * size);
      cuda::round_weights(p, stack, s.count, s.rows, s.columns, forms & 1 ? rows.data() : nullptr,
                          forms & 2 ? columns.data() : nullptr, nullptr);
      const std::vector<bf16> along[] = {rows.host(), columns.host()};
      for (int64_t i = 0; i < s.count * size; ++i) {
        const bf16 expected[] = {back[i], back_t[i]};
        for (int form = 0; form < 2; ++form) {
          if ((forms >> form & 1) == 0) continue;
          const bf16 got = along[form][i];
          ASSERT_TRUE(got.bits == expected[form].bits || (is_nan(got) && is_nan(expected[form])))
              << "form " << form << ", element " << i << ": " << got.bits << ", not "
              << expected[form].bits;
        }
      }
    }
  }
}

TEST_P(Convert, RowsHaveTheHostsBits) {
  const Precision p = GetParam();
  const int block = block_size(p);
  for (const Shape& s :
       std::vector<Shape>{{1, 300, 4096, 4096}, {1, 77, 192, 200}, {1, 5, 33, 40}, {1, 1, 1, 1}}) {
    const std::vector<bf16> x = values(s.rows * s.row_stride);
    const int64_t scales_at = (s.columns + 15) / 16 * 16;
    const int64_t scales = numerics::blocks_of(s.columns, block);
    const int64_t row_bytes = scales_at + (scales + 15) / 16 * 16;
    const Buffer<bf16> on_device(x);
    const Buffer<uint8_t> out(s.rows * row_bytes);
    cuda::quantize_rows(p, {on_device.data(), s.row_stride}, s.rows, s.columns, out.data(),
                        row_bytes, scales_at, nullptr);
    const std::vector<uint8_t> got = out.host();
    std::vector<uint8_t> row(row_bytes);
    for (int64_t r = 0; r < s.rows; ++r) {
      numerics::quantize_row(&x[r * s.row_stride], s.columns, block,
                             reinterpret_cast<e4m3*>(row.data()),
                             reinterpret_cast<e8m0*>(row.data() + scales_at));
      const uint8_t* from = &got[r * row_bytes];
      ASSERT_EQ(std::memcmp(from, row.data(), s.columns), 0) << "codes of row " << r;
      ASSERT_EQ(std::memcmp(from + scales_at, row.data() + scales_at, scales), 0) << r;
    }
  }
}

// Median of 20 calls over more than the L2 cache holds.
template <class F>
void report(const char* what, double bytes, F&& call) {
  cudaEvent_t begin, end;
  cuda::check(cudaEventCreate(&begin), "event");
  cuda::check(cudaEventCreate(&end), "event");
  std::vector<float> ms(20);
  call();
  for (float& t : ms) {
    cuda::check(cudaEventRecord(begin), "record");
    call();
    cuda::check(cudaEventRecord(end), "record");
    cuda::check(cudaEventSynchronize(end), "wait");
    cuda::check(cudaEventElapsedTime(&t, begin, end), "time");
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(ms.begin(), ms.end());
  std::printf("%-34s %8.3f ms %8.1f GB/s\n", what, ms[10], bytes / ms[10] / 1e6);
}

TEST_P(Convert, Speed) {
  const Precision p = GetParam();
  const int64_t count = 64, rows = 1536, columns = 4096, size = rows * columns, n = count * size;
  const Buffer<bf16> x(values(n)), out(n);
  const Buffer<uint8_t> d(n), dt(n), sc(count * scale_bytes(p, rows, columns));
  const Buffer<uint8_t> st(count * scale_bytes(p, columns, rows)), wire(n + n / 16);
  const ConstStack stack{x.data(), size, columns};
  const auto quantize = [&](const QuantizedTarget& t) {
    cuda::quantize_weights(p, stack, count, rows, columns, t, nullptr);
  };
  const auto bytes = static_cast<double>(n);
  const std::string of = name(p);
  if (p == Precision::mxfp8) {
    const Buffer<bf16> other(n);
    report("mxfp8 weights rounded, both forms", 6 * bytes, [&] {
      cuda::round_weights(p, stack, count, rows, columns, out.data(), other.data(), nullptr);
    });
  }
  report((of + " weights, both forms").c_str(), 4 * bytes,
         [&] { quantize({d.data(), sc.data(), dt.data(), st.data()}); });
  report((of + " weights, normal").c_str(), 3 * bytes,
         [&] { quantize({.data = d.data(), .scales = sc.data()}); });
  report((of + " weights, transposed").c_str(), 3 * bytes,
         [&] { quantize({.data_t = dt.data(), .scales_t = st.data()}); });
  report((of + " rows").c_str(), 3 * bytes, [&] {
    const int64_t row_bytes = columns + (columns / block_size(p) + 15) / 16 * 16;
    cuda::quantize_rows(p, {x.data(), columns}, count * rows, columns, wire.data(), row_bytes,
                        columns, nullptr);
  });
  report((of + " back, normal").c_str(), 3 * bytes, [&] {
    cuda::dequantize_weights(p, d.data(), sc.data(), count, rows, columns, out.data(), false,
                             nullptr);
  });
  report((of + " back, transposed").c_str(), 3 * bytes, [&] {
    cuda::dequantize_weights(p, dt.data(), st.data(), count, columns, rows, out.data(), true,
                             nullptr);
  });
}

}  // namespace
}  // namespace mok::testing
