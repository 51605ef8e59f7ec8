#include "problem/problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "mok/error.h"
#include "numerics/bf16.h"
#include "problem/digest.h"
#include "problem/models.h"
#include "problem/npy.h"

namespace mok::problem {
namespace {

using numerics::bf16;

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return e.what();
  }
  return "no error";
}

const LayerShape kShape{.hidden = 48,
                        .intermediate = 20,
                        .experts = 16,
                        .topk = 3,
                        .shared_intermediate = 10,
                        .shared_gate = true};
const std::vector<Tensor> kTensors = {
    Tensor::x,         Tensor::d_y,         Tensor::w_gate,
    Tensor::w_up,      Tensor::w_down,      Tensor::shared_gate,
    Tensor::shared_up, Tensor::shared_down, Tensor::shared_vector};

template <class T>
std::vector<T> get(const Problem& p, Tensor t, int64_t begin, int64_t end, Precision precision) {
  std::vector<T> v((end - begin) * p.row_elements(t));
  p.fill(t, begin, end, precision, v.data());
  return v;
}

std::string digest(const Problem& p, Precision precision) {
  Digest d;
  for (const Tensor t : kTensors) {
    std::vector<std::byte> bytes(p.leading(t) * p.row_elements(t) * element_size(precision));
    p.fill(t, 0, p.leading(t), precision, bytes.data());
    d.add(bytes.data(), bytes.size());
  }
  std::vector<float> weights(p.tokens() * p.shape().topk);
  p.fill_topk_weights(0, p.tokens(), weights.data());
  d.add(weights.data(), weights.size() * sizeof(float));
  return d.hex();
}

std::vector<int64_t> all_ids(const Problem& p) {
  std::vector<int64_t> ids(p.tokens() * p.shape().topk);
  p.fill_topk_ids(0, p.tokens(), ids.data());
  return ids;
}

std::string digest_of_ids(const std::string& routing) {
  const Problem p(kShape, 200, parse_routing(routing), 5);
  const auto ids = all_ids(p);
  Digest d;
  d.add(ids.data(), ids.size() * sizeof(int64_t));
  return d.hex();
}

// A seed means these bits for ever: recorded results would lose their meaning otherwise.
TEST(Generator, GoldenDigests) {
  const Problem p(kShape, 37, {}, 5);
  EXPECT_EQ(digest(p, Precision::bf16), "488fe4a334d51304");
  EXPECT_EQ(digest(p, Precision::fp32), "56b2b9f259728165");
  EXPECT_EQ(digest(p, Precision::fp64), "777d233b7fa273c8");
  EXPECT_EQ(digest_of_ids("uniform"), "8cb35adc81c334a4");
  EXPECT_EQ(digest_of_ids("zipf:1.2"), "629658fdf34aa859");
  EXPECT_EQ(digest_of_ids("zipf:9"), "7d3465829503b959");
}

TEST(Generator, SplitMixIsThePublishedOne) {
  // The first outputs for state 0 of the public-domain reference code.
  EXPECT_EQ(mix(kGolden), 0xe220a8397b1dcdafu);
  EXPECT_EQ(mix(2 * kGolden), 0x6e789e6aa1b965f4u);
}

TEST(Generator, SlicesAreTheWhole) {
  const Problem p(kShape, 37, {}, 5);
  for (const Tensor t : kTensors) {
    const int64_t n = p.leading(t);
    const auto whole = get<float>(p, t, 0, n, Precision::fp32);
    std::vector<float> pieces;
    for (int64_t begin = 0; begin < n; begin += 7) {
      const auto piece = get<float>(p, t, begin, std::min(n, begin + 7), Precision::fp32);
      pieces.insert(pieces.end(), piece.begin(), piece.end());
    }
    EXPECT_EQ(pieces, whole);
    const auto rounded = get<bf16>(p, t, 0, n, Precision::bf16);
    const auto values = p.values(t, 0, n, Precision::bf16);
    for (size_t i = 0; i < whole.size(); ++i) {
      ASSERT_EQ(rounded[i].bits, numerics::to_bf16(whole[i]).bits);
      ASSERT_EQ(values[i], numerics::to_float(rounded[i]));
    }
  }
}

// What the global token count is does not matter to a token.
TEST(Generator, TokensDoNotKnowHowManyThereAre) {
  const Problem few(kShape, 10, parse_routing("zipf:1"), 5);
  const Problem many(kShape, 1000, parse_routing("zipf:1"), 5);
  EXPECT_EQ(get<double>(few, Tensor::x, 3, 10, Precision::fp64),
            get<double>(many, Tensor::x, 3, 10, Precision::fp64));
  const auto all = all_ids(many);
  EXPECT_EQ(all_ids(few), std::vector<int64_t>(all.begin(), all.begin() + 30));
  std::vector<int32_t> narrow(15);
  many.fill_topk_ids(5, 10, narrow.data());
  EXPECT_EQ(std::vector<int64_t>(narrow.begin(), narrow.end()),
            std::vector<int64_t>(all.begin() + 15, all.begin() + 30));
}

TEST(Generator, NormalValuesOfTheStatedSpread) {
  const Problem p({.hidden = 256, .intermediate = 100, .experts = 4, .topk = 1}, 1000, {}, 1);
  for (const auto& [t, deviation] : {std::pair{Tensor::x, 1.0},
                                     {Tensor::d_y, 1.0},
                                     {Tensor::w_gate, 1 / 16.0},
                                     {Tensor::w_down, 0.1}}) {
    const auto v = p.values(t, 0, p.leading(t), Precision::fp64);
    double sum = 0, squares = 0, most = 0;
    for (const double e : v) {
      sum += e;
      squares += e * e;
      most = std::max(most, std::fabs(e));
    }
    const double n = static_cast<double>(v.size());
    EXPECT_NEAR(sum / n, 0, 5 * deviation / std::sqrt(n));
    EXPECT_NEAR(std::sqrt(squares / n), deviation, 0.01 * deviation);
    EXPECT_GT(most, 3 * deviation);
    EXPECT_LT(most, 3.47 * deviation);
  }
  EXPECT_NE(p.values(Tensor::w_gate, 0, 1, Precision::fp32),
            p.values(Tensor::w_up, 0, 1, Precision::fp32));
}

LayerShape limited(int64_t hidden) {
  return {.hidden = hidden,
          .intermediate = 24,
          .experts = 2,
          .topk = 1,
          .shared_intermediate = 24,
          .swiglu_limit = 0.5f};
}

// A gate's sum is the same forwards and backwards: exact, and so is its rounding.
TEST(LimitedProblems, GateSumsAreExactInAnyOrder) {
  for (const int64_t H : {1, 64, 192, 2048, 2880, 7168}) {
    const Problem p(limited(H), 16, {}, 7);
    const auto x = get<float>(p, Tensor::x, 0, 16, Precision::fp32);
    for (const Tensor t : {Tensor::w_gate, Tensor::w_up, Tensor::shared_gate, Tensor::shared_up}) {
      const auto w = get<float>(p, t, 0, p.leading(t), Precision::fp32);
      const int64_t columns = std::ssize(w) / H;
      for (int64_t i = 0; i < 16 * columns; ++i) {
        const float *a = &x[i / columns * H], *b = &w[i % columns * H];
        float forwards = 0, backwards = 0;
        double exact = 0;
        for (int64_t h = 0; h < H; ++h) {
          forwards += a[h] * b[h];
          backwards += a[H - 1 - h] * b[H - 1 - h];
          exact += static_cast<double>(a[h]) * static_cast<double>(b[h]);
        }
        ASSERT_EQ(forwards, backwards) << "H " << H;
        ASSERT_EQ(static_cast<double>(forwards), exact) << "H " << H;
      }
    }
  }
}

TEST(LimitedProblems, StepsAreBoundedAndTheSameInEveryType) {
  static_assert(kMostExactHidden == 32768);
  for (const int64_t H : {1, 3, 100, 2048, 32768}) {
    const Problem p(limited(H), 20, {}, 7);
    for (const Tensor t :
         {Tensor::x, Tensor::w_gate, Tensor::w_up, Tensor::shared_gate, Tensor::shared_up}) {
      const Grid grid = p.grid(t);
      const auto v = p.values(t, 0, p.leading(t), Precision::fp64);
      EXPECT_EQ(v, p.values(t, 0, p.leading(t), Precision::fp32));
      EXPECT_EQ(v, p.values(t, 0, p.leading(t), Precision::bf16));
      double squares = 0;
      for (const double e : v) {
        const double steps = e / static_cast<double>(grid.step);
        ASSERT_EQ(steps, std::round(steps));
        ASSERT_LE(std::fabs(steps), grid.most);
        squares += e * e;
      }
      if (v.size() < 10000) continue;
      EXPECT_NEAR(std::sqrt(squares / static_cast<double>(v.size())) / p.scale(t), 1, 0.03);
    }
    for (const Tensor t : {Tensor::d_y, Tensor::w_down, Tensor::shared_down}) {
      EXPECT_EQ(p.grid(t).step, 0);
    }
  }
  for (const Tensor t : kTensors) EXPECT_EQ(Problem(kShape, 1, {}, 1).grid(t).step, 0);
}

TEST(LimitedProblems, GoldenDigests) {
  LayerShape shape = kShape;
  shape.swiglu_limit = 1;
  const Problem p(shape, 37, {}, 5);
  EXPECT_EQ(digest(p, Precision::bf16), "8b15f066283ffd03");
  EXPECT_EQ(digest(p, Precision::fp64), "94a11a9a86b396fe");
}

TEST(Generator, SeedsDiffer) {
  EXPECT_NE(digest(Problem(kShape, 4, {}, 0), Precision::bf16),
            digest(Problem(kShape, 4, {}, 1), Precision::bf16));
}

TEST(Generator, RouterWeightsArePositiveAndAddUpToOne) {
  const Problem p(kShape, 500, {}, 5);
  std::vector<double> w(1500);
  std::vector<float> narrow(1500);
  p.fill_topk_weights(0, 500, w.data());
  p.fill_topk_weights(0, 500, narrow.data());
  for (int t = 0; t < 500; ++t) {
    EXPECT_NEAR(w[t * 3] + w[t * 3 + 1] + w[t * 3 + 2], 1, 1e-6);
    for (int k = 0; k < 3; ++k) {
      EXPECT_GT(w[t * 3 + k], 0.01);
      EXPECT_EQ(w[t * 3 + k], narrow[t * 3 + k]);
    }
  }
}

void expect_distinct(const Problem& p) {
  const auto ids = all_ids(p);
  const int K = p.shape().topk;
  for (int64_t t = 0; t < p.tokens(); ++t) {
    const std::set<int64_t> set(ids.begin() + t * K, ids.begin() + (t + 1) * K);
    ASSERT_EQ(static_cast<int>(set.size()), K);
    ASSERT_GE(*set.begin(), 0);
    ASSERT_LT(*set.rbegin(), p.shape().experts);
  }
}

TEST(RoutingKinds, DistinctExperts) {
  for (const char* routing : {"uniform", "zipf:0", "zipf:1.5", "zipf:8", "zipf:1000"}) {
    for (const int K : {1, 8, 64}) {
      LayerShape shape = kShape;
      shape.experts = 64;
      shape.topk = K;
      expect_distinct(Problem(shape, 50, parse_routing(routing), 9));
    }
  }
}

std::vector<double> frequencies(const std::string& routing, int64_t tokens) {
  LayerShape shape = kShape;
  shape.topk = 1;
  const Problem p(shape, tokens, parse_routing(routing), 9);
  std::vector<double> f(shape.experts);
  for (const int64_t id : all_ids(p)) f[id] += 1.0 / static_cast<double>(tokens);
  return f;
}

TEST(RoutingKinds, UniformUsesAllExpertsAlike) {
  for (const double f : frequencies("uniform", 100000)) EXPECT_NEAR(f, 1.0 / 16, 0.004);
}

TEST(RoutingKinds, ZipfFollowsItsWeights) {
  std::vector<double> f = frequencies("zipf:1.2", 100000);
  EXPECT_FALSE(std::is_sorted(f.rbegin(), f.rend()));  // the popular experts are not 0, 1, 2 ...
  std::sort(f.rbegin(), f.rend());
  double sum = 0;
  for (int rank = 1; rank <= 16; ++rank) sum += std::pow(rank, -1.2);
  for (int rank = 1; rank <= 16; ++rank) {
    EXPECT_NEAR(f[rank - 1], std::pow(rank, -1.2) / sum, 0.006) << rank;
  }
}

TEST(RoutingKinds, OneExpertAndNone) {
  const auto one = all_ids(Problem(kShape, 4, parse_routing("one-expert"), 1));
  EXPECT_EQ(one, (std::vector<int64_t>{0, -1, -1, 0, -1, -1, 0, -1, -1, 0, -1, -1}));
  const auto none = all_ids(Problem(kShape, 2, parse_routing("none"), 1));
  EXPECT_EQ(none, std::vector<int64_t>(6, -1));
}

TEST(RoutingKinds, TextBothWays) {
  for (const char* text :
       {"uniform", "zipf:1.25", "zipf:0", "one-expert", "none", "file:a/b.npy"}) {
    EXPECT_EQ(to_string(parse_routing(text)), text);
  }
  for (const char* text : {"", "zipf", "zipf:", "zipf:x", "zipf:1x", "zipf:-1", "zipf:inf",
                           "zipf:nan", "file:", "Uniform"}) {
    EXPECT_TRUE(message([&] { parse_routing(text); }).starts_with("routing:")) << text;
  }
}

class Files : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() /
              (std::string("mok-") + info->name() + "-" + std::to_string(std::random_device{}()));
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  // An .npy file by hand: version, header text, values.
  std::string write(int version, std::string header, const std::string& values) const {
    std::string bytes = "\x93NUMPY";
    bytes += static_cast<char>(version);
    bytes += '\0';
    const uint32_t length = static_cast<uint32_t>(header.size());
    bytes.append(reinterpret_cast<const char*>(&length), version == 1 ? 2 : 4);
    return write(bytes + header + values);
  }
  std::string write(const std::string& bytes) const {
    const std::string file = path("a.npy");
    std::ofstream(file, std::ios::binary) << bytes;
    return file;
  }
  static std::string header(const std::string& type, const std::string& order,
                            const std::string& shape) {
    return "{'descr': '" + type + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
  }
  template <class T>
  static std::string bytes(const std::vector<T>& v) {
    return {reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T)};
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(Files, RoundTrip) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 3}, {6}, {0, 4}, {6, 1}}) {
    NpyInts a{shape, {}};
    for (int64_t i = 0; i < (shape[0] == 0 ? 0 : 6); ++i) a.values.push_back((i - 2) << 33);
    write_npy_ints(path("a.npy"), a);
    const NpyInts b = read_npy_ints(path("a.npy"));
    EXPECT_EQ(b.shape, a.shape);
    EXPECT_EQ(b.values, a.values);
    EXPECT_EQ(std::filesystem::file_size(path("a.npy")), 128 + 8 * a.values.size());
  }
}

TEST_F(Files, TypesVersionsAndSpacing) {
  const std::vector<int32_t> narrow = {1, -1, 7, 2147483647};
  const std::vector<int64_t> wide(narrow.begin(), narrow.end());
  for (const int version : {1, 2, 3}) {
    EXPECT_EQ(read_npy_ints(write(version, header("<i4", "False", "(2, 2)"), bytes(narrow))).values,
              wide);
    EXPECT_EQ(read_npy_ints(write(version, header("<i8", "False", "(2,2)"), bytes(wide))).values,
              wide);
  }
  // A column is the same in both orders.
  EXPECT_EQ(read_npy_ints(write(1, header("<i8", "True", "(4, 1)"), bytes(wide))).values, wide);
  EXPECT_EQ(read_npy_ints(write(1, header("<i8", "True", "(4,)"), bytes(wide))).values, wide);
}

TEST_F(Files, MalformedOnesSayWhatIsWrong) {
  const std::string four = bytes(std::vector<int64_t>{1, 2, 3, 4});
  const std::string good = header("<i8", "False", "(2, 2)");
  const auto says = [&](const std::string& file, const std::string& what) {
    const std::string text = message([&] { read_npy_ints(file); });
    EXPECT_TRUE(text.starts_with(file)) << text;
    EXPECT_NE(text.find(what), text.npos) << text;
  };
  says(path("missing.npy"), "cannot be opened");
  says(path(""), "cannot be read");
  says(write(""), "not an .npy file");
  says(write("PK\x03\x04 something else"), "not an .npy file");
  says(write("\x93NUMPY\x01"), "ends inside its header");
  says(write(std::string("\x93NUMPY\x01\x00\xff\xff{", 11)), "ends inside its header");
  says(write(std::string("\x93NUMPY\x02\x00\x10\x00", 10)), "ends inside its header");
  says(write(4, good, four), "version 4");
  says(write(1, good, four.substr(1)), "31 bytes");
  says(write(1, good, four + "x"), "33 bytes");
  says(write(1, header("<f4", "False", "(2, 4)"), four), "'<f4'");
  says(write(1, header(">i8", "False", "(2, 2)"), four), "'>i8'");
  says(write(1, header("<i8", "True", "(2, 2)"), four), "Fortran");
  says(write(1, header("<i8", "Maybe", "(2, 2)"), four), "fortran_order");
  says(write(1, header("<i8", "False", "(1, 2, 2)"), four), "3 dimensions");
  says(write(1, header("<i8", "False", "()"), four), "0 dimensions");
  says(write(1, header("<i8", "False", "(2, -2)"), four), "shape");
  says(write(1, header("<i8", "False", "(2 2)"), four), "shape");
  says(write(1, header("<i8", "False", "2, 2"), four), "shape");
  says(write(1, header("<i8", "False", "(4611686018427387904, 4)"), four), "too large");
  says(write(1, "{'fortran_order': False, 'shape': (2, 2)}", four), "descr");
  says(write(1, "{'shape': (4,), 'descr'", four), "descr");
}

TEST_F(Files, RoutingFromAFile) {
  const NpyInts ids{{3, 3}, {0, 1, 2, 15, -1, 15, -1, -1, -1}};
  write_npy_ints(path("ids.npy"), ids);
  const Routing routing = parse_routing("file:" + path("ids.npy"));
  const Problem p(kShape, 3, routing, 1);
  EXPECT_EQ(all_ids(p), ids.values);
  int32_t last[3];
  p.fill_topk_ids(1, 2, last);
  EXPECT_EQ(last[0], 15);

  const auto says = [&](int64_t tokens, const std::string& what) {
    const std::string text = message([&] { Problem(kShape, tokens, routing, 1); });
    EXPECT_TRUE(text.starts_with("routing:")) << text;
    EXPECT_NE(text.find(what), text.npos) << text;
  };
  says(4, "shape (3, 3), wanted (4, 3)");
  for (const int64_t bad : {16, -2}) {
    write_npy_ints(path("ids.npy"), {{3, 3}, {0, 1, 2, 3, bad, 5, 6, 7, 8}});
    says(3, "token 1, slot 1: expert " + std::to_string(bad));
  }
}

TEST(ProblemArguments, AreNamed) {
  const auto with = [](const std::function<void(LayerShape&)>& spoil) {
    return message([&] {
      LayerShape shape = kShape;
      spoil(shape);
      Problem(shape, 1, {}, 1);
    });
  };
  EXPECT_TRUE(with([](LayerShape& s) { s.hidden = 0; }).starts_with("hidden:"));
  EXPECT_TRUE(with([](LayerShape& s) { s.intermediate = -1; }).starts_with("intermediate:"));
  EXPECT_TRUE(with([](LayerShape& s) { s.experts = 4097; }).starts_with("experts:"));
  EXPECT_TRUE(with([](LayerShape& s) { s.topk = 17; }).starts_with("topk:"));
  EXPECT_TRUE(with([](LayerShape& s) { s.topk = 0; }).starts_with("topk:"));
  EXPECT_TRUE(with([](LayerShape& s) { s.shared_intermediate = -1; }).starts_with("shared:"));
  EXPECT_TRUE(with([](LayerShape& s) { s.shared_intermediate = 0; }).starts_with("shared_gate:"));
  EXPECT_TRUE(with([](LayerShape& s) { s.swiglu_limit = 0; }).starts_with("swiglu_limit:"));
  EXPECT_TRUE(with([](LayerShape& s) { s.swiglu_limit = NAN; }).starts_with("swiglu_limit:"));
  EXPECT_TRUE(message([] { Problem(kShape, -1, {}, 1); }).starts_with("tokens:"));
  const Problem p(kShape, 2, {}, 1);
  float out[96];
  EXPECT_TRUE(
      message([&] { p.fill(Tensor::x, 1, 3, Precision::fp32, out); }).starts_with("slice:"));
}

TEST(OracleInputs, HoldWhatAnExecutorIsGiven) {
  const Problem p(kShape, 7, {}, 5);
  const reference::Inputs in = oracle_inputs(p, Precision::bf16, {3, 4}, true);
  EXPECT_TRUE(in.round_bf16);
  EXPECT_EQ(in.x, p.values(Tensor::x, 0, 7, Precision::bf16));
  EXPECT_EQ(in.expert(3).down, p.values(Tensor::w_down, 3, 4, Precision::bf16));
  EXPECT_EQ(in.topk_ids, all_ids(p));
  const reference::Outputs out = reference::run(in);
  EXPECT_EQ(out.y.size(), 7u * 48);
  EXPECT_EQ(out.d_shared.size(), 2u);
  EXPECT_TRUE(reference::run(oracle_inputs(p, Precision::fp64, {7}, false)).d_x.empty());
}

TEST(Digest, DoesNotDependOnTheCuts) {
  std::vector<uint8_t> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7);
  Digest whole, pieces, rows;
  whole.add(bytes.data(), 1000);
  for (size_t at = 0; at < 1000; at += 40) pieces.add(&bytes[at], 40);
  pieces.add(nullptr, 0);
  rows.add_rows(bytes.data(), 10, 100, 100);
  EXPECT_EQ(whole.value(), pieces.value());
  EXPECT_EQ(whole.value(), rows.value());
  EXPECT_EQ(whole.hex().size(), 16u);
  Digest strided, packed;
  strided.add_rows(bytes.data(), 3, 10, 100);
  for (const int at : {0, 100, 200}) packed.add(&bytes[at], 10);
  EXPECT_EQ(strided.hex(), packed.hex());
  EXPECT_NE(strided.hex(), whole.hex());
  EXPECT_EQ(Digest().hex(), "2d06800538d394c2");  // XXH3 of nothing
}

TEST(Models, AreTheTable) {
  EXPECT_EQ(models().size(), 15u);
  std::set<std::string_view> names;
  for (const Model& m : models()) {
    EXPECT_NO_THROW(check_shape(m.shape)) << m.name;
    EXPECT_EQ(m.shape.hidden % 64, 0) << m.name;
    EXPECT_EQ(m.shape.intermediate % 64, 0) << m.name;
    EXPECT_EQ(m.shape.experts % 8, 0) << m.name;
    EXPECT_EQ(find_model(m.name), &m);
    EXPECT_EQ(m.unconfirmed && m.note.empty(), false) << m.name;
    names.insert(m.name);
  }
  EXPECT_EQ(names.size(), models().size());
  EXPECT_EQ(find_model("gpt-5"), nullptr);

  const Model& qwen = *find_model("qwen3.5-35b-a3b");
  EXPECT_EQ(qwen.shape.hidden, 2048);
  EXPECT_EQ(qwen.shape.intermediate, 512);
  EXPECT_EQ(qwen.shape.experts, 256);
  EXPECT_EQ(qwen.shape.topk, 8);
  EXPECT_EQ(qwen.shape.shared_intermediate, 512);
  EXPECT_TRUE(qwen.shape.shared_gate);
  const Model& v3 = *find_model("deepseek-v3");
  EXPECT_EQ(v3.router.scoring, Scoring::sigmoid);
  EXPECT_EQ(v3.router.groups, 8);
  EXPECT_EQ(v3.router.groups_taken, 4);
  EXPECT_EQ(v3.router.scale, 2.5);
  EXPECT_EQ(find_model("deepseek-v4-flash")->shape.swiglu_limit, 10);
  EXPECT_TRUE(find_model("deepseek-v4-pro")->unconfirmed);
  EXPECT_NE(find_model("gpt-oss-120b")->note.find("plain form"), std::string_view::npos);
}

}  // namespace
}  // namespace mok::problem
