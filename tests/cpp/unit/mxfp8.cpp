#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "numerics/mxfp8.h"

namespace mok::numerics {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double value(int code) {  // from the format's definition
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 7 - 3);
  return (code & 0x80) != 0 ? -size : size;
}

TEST(E4m3, EveryCodeSurvives) {
  for (int code = 0; code < 256; ++code) {
    const float f = to_float(e4m3{static_cast<uint8_t>(code)});
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(f));
      EXPECT_EQ(to_e4m3(f).bits, 0x7f);
    } else {
      EXPECT_EQ(static_cast<double>(f), value(code));
      EXPECT_EQ(to_e4m3(f).bits, code);
    }
  }
}

// At, just below and just above every point between two neighbours.
TEST(E4m3, RoundsEveryTieToEvenAndItsSurroundingsToNearest) {
  for (int low = 0; low < 0x7e; ++low) {
    const auto middle = static_cast<float>((value(low) + value(low + 1)) / 2);  // exact
    for (const int sign : {0, 0x80}) {
      const float m = sign != 0 ? -middle : middle;
      EXPECT_EQ(to_e4m3(m).bits, (low + (low & 1)) | sign);
      EXPECT_EQ(to_e4m3(std::nextafter(m, 0.0f)).bits, low | sign);
      EXPECT_EQ(to_e4m3(std::nextafter(m, m * 2)).bits, (low + 1) | sign);
    }
  }
}

TEST(E4m3, Saturates) {
  for (const float v : {447.0f, 448.0f, 449.0f, 464.0f, 464.0001f, 480.0f, 1e4f, 3e38f, kInf}) {
    EXPECT_EQ(to_e4m3(v).bits, 0x7e) << v;
    EXPECT_EQ(to_e4m3(-v).bits, 0xfe) << v;
  }
  EXPECT_EQ(to_e4m3(431.9f).bits, 0x7d);  // below the tie of 416 and 448
  EXPECT_EQ(to_e4m3(kNan).bits, 0x7f);
  EXPECT_EQ(to_e4m3(-kNan).bits, 0x7f);
  EXPECT_EQ(to_e4m3(1e-45f).bits, 0);
  EXPECT_EQ(to_e4m3(-0.0f).bits, 0x80);
}

TEST(Mxfp8, ScaleIsTheSmallestPowerThatIsEnough) {
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const float amax = to_float(bf16{static_cast<uint16_t>(bits)});
    const int exponent = mx_scale(amax).bits - 127;
    const double floored = std::fmax(static_cast<double>(amax), static_cast<double>(kMxAmaxFloor));
    ASSERT_GE(std::ldexp(448.0, exponent), floored);
    ASSERT_LT(std::ldexp(448.0, exponent - 1), floored);
    ASSERT_EQ(to_float(mx_scale(amax)) * mx_inverse(mx_scale(amax)), 1.0f);
  }
  EXPECT_EQ(mx_scale(0.0f).bits, kMxZeroScale);
  EXPECT_EQ(mx_scale(kInf).bits, 254);
  const auto amax = [](std::initializer_list<float> values) {
    uint32_t bits = 0;
    for (const float v : values) bits = mx_amax(bits, to_bf16(v));
    return to_float(bf16{static_cast<uint16_t>(bits)});
  };
  EXPECT_EQ(amax({-2.0f, kNan, 1.0f}), 2.0f);
  EXPECT_EQ(amax({1.0f, -kInf}), kInf);
  EXPECT_EQ(amax({kNan, -kNan}), 0.0f);
}

TEST(Mxfp8, ScalesFillTheirTiles) {
  const int64_t rows = 300, columns = 200;
  const int64_t tiles = mx_tiles(columns);
  std::set<int64_t> places;
  for (int64_t row = 0; row < mx_tiles(rows) * kMxTile; ++row) {
    for (int64_t block = 0; block < tiles * 4; ++block) {
      places.insert(mx_scale_offset(row, block, tiles));
    }
  }
  EXPECT_EQ(static_cast<int64_t>(places.size()), mx_tiles(rows) * tiles * kMxTileBytes);
  EXPECT_EQ(*places.begin(), 0);
  EXPECT_EQ(*places.rbegin(), mx_tiles(rows) * tiles * kMxTileBytes - 1);
  EXPECT_EQ(mx_scale_offset(128 + 33, 6, tiles), (2 + 1) * 512 + 1 * 16 + 1 * 4 + 2);
}

}  // namespace
}  // namespace mok::numerics
