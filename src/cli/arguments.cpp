#include "cli/arguments.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "cli/cuda_support.h"
#include "problem/models.h"

namespace mok::cli {

void require(bool good, const std::string& option, const std::string& what) {
  if (!good) throw Error(ErrorCode::bad_argument, option + ": " + what);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1) {
    parts.push_back(text.substr(begin, end - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

int64_t parse_integer(const std::string& option, const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  require(error == std::errc() && stop == end, option, "'" + text + "' is not an integer");
  return value;
}

void Arguments::add_shape(CLI::App& app) {
  app.add_option("--model", model, "a preset; the sizes below replace its own")->type_name("NAME");
  app.add_option("--hidden", hidden_, "H")->type_name("N");
  app.add_option("--intermediate", intermediate_, "I, of a routed expert")->type_name("N");
  app.add_option("--experts", experts_, "E, of all ranks")->type_name("N");
  app.add_option("--topk", topk_, "K, experts per token")->type_name("N");
  app.add_option("--shared", shared_, "I_s of the shared expert; 0 = none")->type_name("N");
  app.add_flag("--shared-gate", shared_gate_, "the shared expert is scaled by a sigmoid gate");
  app.add_option("--swiglu-limit", limit_, "clamps gate and up")->type_name("L");
}

void Arguments::add_problem(CLI::App& app) {
  app.add_option("--tokens", tokens, "of each rank: N, or N0,N1,...")->type_name("N");
  app.add_option("--ep", ep_, "expert-parallel ranks, 1..8")->type_name("R");
  app.add_option("--routing", routing, "uniform, zipf:A, one-expert, none, file:IDS.npy")
      ->type_name("KIND");
  app.add_option("--seed", seed_, "of inputs and routing")->type_name("S");
  app.add_option("--precision", precision_, "bf16, mxfp8, fp8, fp32 or fp64")
      ->check(CLI::IsMember({"bf16", "mxfp8", "fp8", "fp32", "fp64"}))
      ->type_name("P");
  app.add_option("--pass", pass, "forward or both (default: both; mok bench: forward)")
      ->check(CLI::IsMember({"forward", "both"}))
      ->type_name("P");
}

void Arguments::add_knobs(CLI::App& app) {
  app.add_option("--ring", ring_, "rows in flight; 0 = the expected rows")->type_name("ROWS");
  app.add_option("--minibatch", minibatch_, "rows between interleavings")->type_name("ROWS");
  app.add_option("--saved-rows", saved_rows_, "rows kept for backward; -1 = the expected rows")
      ->type_name("ROWS");
}

void Arguments::add_execution(CLI::App& app) {
  app.add_option("--grads", grads,
                 "weight gradients: sum (fp32), bf16, or accumulate: added to fp32 zeros (default: "
                 "sum; mok bench: bf16)")
      ->check(CLI::IsMember({"sum", "bf16", "accumulate"}))
      ->type_name("MODE");
  app.add_option("--device", device, "cpu, cuda, or auto: cuda where it can do what is asked")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->type_name("D");
  app.add_option("--ranks", ranks_, "CPU ranks are threads or processes")
      ->check(CLI::IsMember({"threads", "processes"}))
      ->type_name("KIND");
  app.add_option("--workers", workers_, "CPU compute threads per rank; 0 = cores / ranks")
      ->type_name("N");
  app.add_option("--comm-workers", comm_workers_, "CPU communication threads per rank")
      ->type_name("N");
  app.add_option("--arrival-deadline", arrival_, "seconds for a peer to arrive; 0 = none")
      ->type_name("S");
  app.add_option("--progress-deadline", progress_, "seconds without progress; 0 = none")
      ->type_name("S");
  app.add_option("--gpus", gpus_, "GPUs to use: 0,1,... (default: the first ones)")
      ->type_name("LIST");
  app.add_flag("--virtual", virtual_, "more ranks than GPUs: ranks share GPUs");
  app.add_option("--sm-reserve", sm_reserve_, "SMs of each GPU that are left alone")
      ->type_name("N");
  app.add_option("--comm-blocks", comm_blocks_, "blocks per rank that communicate; 0 = all")
      ->type_name("N");
}

Arguments Arguments::with(const std::string& one_model, const std::string& one_routing) const {
  Arguments copy = *this;
  copy.model = one_model;
  copy.routing = one_routing;
  return copy;
}

LayerShape Arguments::shape(Spec& spec) const {
  LayerShape s;
  if (!model.empty()) {
    const problem::Model* preset = problem::find_model(model);
    if (!preset) {
      std::string names;
      for (const problem::Model& m : problem::models()) names += " " + std::string(m.name);
      require(false, "--model", "'" + model + "' is none of" + names);
    }
    s = preset->shape;
    spec.model = model;
    spec.note = preset->note;
  } else {
    const std::string missing = !hidden_         ? "--hidden"
                                : !intermediate_ ? "--intermediate"
                                : !experts_      ? "--experts"
                                : !topk_         ? "--topk"
                                                 : "";
    require(missing.empty(), missing, "is missing (or give a --model)");
  }
  constexpr int64_t kMost = int64_t{1} << 24;
  const auto take = [](const char* option, const std::optional<int64_t>& given, int64_t least,
                       int64_t most, auto* out) {
    if (!given) return;
    require(*given >= least && *given <= most, option,
            std::to_string(*given) + " is outside " + std::to_string(least) + ".." +
                std::to_string(most));
    *out = static_cast<std::remove_reference_t<decltype(*out)>>(*given);
  };
  take("--hidden", hidden_, 1, kMost, &s.hidden);
  take("--intermediate", intermediate_, 1, kMost, &s.intermediate);
  take("--experts", experts_, 1, kMaxExperts, &s.experts);
  take("--topk", topk_, 1, kMaxTopk, &s.topk);
  take("--shared", shared_, 0, kMost, &s.shared_intermediate);
  require(s.topk <= s.experts, "--topk",
          std::to_string(s.topk) + " is more than the " + std::to_string(s.experts) + " experts");
  if (shared_ && *shared_ == 0) s.shared_gate = false;
  if (shared_gate_) s.shared_gate = true;
  require(!s.shared_gate || s.shared_intermediate > 0, "--shared-gate", "without --shared");
  if (limit_) {
    require(*limit_ > 0, "--swiglu-limit", std::to_string(*limit_) + " is not positive");
    s.swiglu_limit = static_cast<float>(*limit_);
  }
  problem::check_shape(s);
  return s;
}

Spec Arguments::spec(Use use) const {
  Spec spec;
  spec.shape = shape(spec);
  const LayerShape& s = spec.shape;

  require(!tokens.empty(), "--tokens", "is missing");
  require(ep_ >= 1 && ep_ <= kMaxRanks, "--ep",
          std::to_string(ep_) + " is outside 1.." + std::to_string(kMaxRanks));
  require(s.experts % ep_ == 0, "--ep",
          std::to_string(ep_) + " ranks do not divide " + std::to_string(s.experts) + " experts");
  for (const std::string& part : split(tokens, ',')) {
    spec.tokens.push_back(parse_integer("--tokens", part));
    require(spec.tokens.back() >= 0, "--tokens", part + " is negative");
  }
  if (spec.tokens.size() == 1) spec.tokens.assign(static_cast<size_t>(ep_), spec.tokens[0]);
  require(
      std::ssize(spec.tokens) == ep_, "--tokens",
      std::to_string(spec.tokens.size()) + " numbers for " + std::to_string(ep_) + " ranks (--ep)");
  const int64_t most = *std::max_element(spec.tokens.begin(), spec.tokens.end());
  constexpr int64_t kMostSlots = (int64_t{1} << 31) - 1;
  require(
      most <= kMostSlots / (ep_ * s.topk), "--tokens",
      std::to_string(most) + " a rank are too many: ranks * tokens * topk must stay below 2^31");
  spec.workspace.max_tokens = most;

  try {
    spec.routing = problem::parse_routing(routing);
  } catch (const Error& e) {
    throw Error(ErrorCode::bad_argument, std::string("--") + e.what());
  }
  const char* seed_end = seed_.data() + seed_.size();
  const auto [stop, error] = std::from_chars(seed_.data(), seed_end, spec.seed);
  require(error == std::errc() && stop == seed_end, "--seed",
          "'" + seed_ + "' is not an integer of 64 bits without a sign");
  for (const Precision p :
       {Precision::bf16, Precision::fp32, Precision::fp64, Precision::mxfp8, Precision::fp8}) {
    if (precision_ == to_string(p)) spec.precision = p;
  }
  spec.backward = pass != "forward";

  const auto range = [](const char* option, int64_t value, int64_t least, int64_t above = 1 << 30) {
    require(value >= least && value <= above, option,
            std::to_string(value) + " is outside " + std::to_string(least) + ".." +
                std::to_string(above));
    return value;
  };
  spec.workspace.ring_rows = range("--ring", ring_, 0);
  spec.workspace.minibatch_rows = range("--minibatch", minibatch_, 1);
  spec.workspace.saved_rows = range("--saved-rows", saved_rows_, -1);
  if (use == Use::plan) return spec;

  spec.workspace.compute_workers = static_cast<int>(range("--workers", workers_, 0, 1024));
  spec.workspace.comm_workers = static_cast<int>(range("--comm-workers", comm_workers_, 1, 1024));
  constexpr double kMostSeconds = 1e9;
  require(arrival_ >= 0 && arrival_ <= kMostSeconds, "--arrival-deadline", "is outside 0..1e9");
  require(progress_ >= 0 && progress_ <= kMostSeconds, "--progress-deadline", "is outside 0..1e9");
  spec.deadlines = {arrival_, progress_};
  spec.processes = ranks_ == "processes";
  spec.grads = grads == "bf16"         ? GradMode::storage
               : grads == "accumulate" ? GradMode::accumulate
                                       : GradMode::sum;
  require(spec.grads != GradMode::storage || storage_type(spec.precision) == Precision::bf16,
          "--grads", "bf16 does not go with --precision fp32 or fp64");
  spec.sm_reserve = static_cast<int>(range("--sm-reserve", sm_reserve_, 0, 1024));
  spec.comm_blocks = static_cast<int>(range("--comm-blocks", comm_blocks_, 0, 1024));
  choose_device(spec);
  return spec;
}

problem::Problem make_problem(const Spec& spec, uint64_t seed) {
  try {
    return problem::Problem(spec.shape, spec.global_tokens(), spec.routing, seed);
  } catch (const Error& e) {
    const std::string text = e.what();
    const std::string known = "routing: ";
    throw Error(e.code(), "--routing: " + text.substr(text.starts_with(known) ? known.size() : 0));
  }
}

void Arguments::choose_device(Spec& spec) const {
  std::vector<int> gpus;
  if (!gpus_.empty()) {
    for (const std::string& part : split(gpus_, ',')) {
      const int64_t gpu = parse_integer("--gpus", part);
      require(gpu >= 0 && gpu < 1024, "--gpus", part + " is no GPU");
      require(std::find(gpus.begin(), gpus.end(), gpu) == gpus.end(), "--gpus",
              part + " is there twice");
      gpus.push_back(static_cast<int>(gpu));
    }
  }
  if (device == "cpu") return;

  Spec cuda = spec;
  cuda.device = Device::cuda;
  const std::string refused = cuda_refuses(cuda);
  if (device == "cuda" && !refused.empty()) throw Error(ErrorCode::bad_argument, refused);
  if (!refused.empty()) return;
  const std::string missing = why_no_gpu();
  if (!missing.empty()) {
    if (device == "auto") return;
    throw Error(ErrorCode::unsupported, "--device cuda: " + missing);
  }
  const int count = gpu_count();
  for (const int gpu : gpus) {
    require(gpu < count, "--gpus",
            std::to_string(gpu) + ": this machine has " + std::to_string(count));
  }
  const int ranks = spec.ranks();
  if (gpus.empty()) {
    for (int i = 0; i < std::min(count, ranks); ++i) gpus.push_back(i);
  }
  const int n = std::min(static_cast<int>(gpus.size()), ranks);
  if (n < ranks && !virtual_) {
    if (device == "auto") return;
    require(false, "--ep",
            std::to_string(ranks) + " ranks on " + std::to_string(n) +
                " GPUs: --virtual lets ranks share a GPU");
  }
  for (int r = 0; r < ranks; ++r) cuda.gpus.push_back(gpus[r * n / ranks]);
  spec = cuda;
}

}  // namespace mok::cli
