// mok check: the table of check_cases.h, one line each.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>

#include "cli/arguments.h"
#include "cli/check_cases.h"
#include "cli/commands.h"
#include "cli/cuda_support.h"
#include "cli/json.h"
#include "cli/results.h"
#include "problem/npy.h"

namespace mok::cli {
namespace {

struct Options {
  std::string device = "cpu", only;
};

// A file of ids that goes away with it.
class IdsFile {
 public:
  IdsFile(const LayerShape& shape, int64_t tokens) {
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder && *folder ? folder : "/tmp") + "/mok-ids-XXXXXX";
    const int fd = mkstemp(path_.data());
    if (fd < 0) throw Error(ErrorCode::unsupported, "cannot write " + path_);
    close(fd);
    problem::write_npy_ints(path_, {{tokens, shape.topk}, ids_with_holes(shape, tokens)});
  }
  ~IdsFile() { unlink(path_.c_str()); }
  IdsFile(const IdsFile&) = delete;
  IdsFile& operator=(const IdsFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Spec spec_of(const CheckCase& c, Device device) {
  Spec spec;
  spec.shape = c.shape;
  spec.tokens = c.tokens;
  spec.precision = c.precision;
  spec.processes = c.processes;
  spec.workspace.max_tokens = *std::max_element(c.tokens.begin(), c.tokens.end());
  spec.workspace.ring_rows = c.ring;
  spec.workspace.minibatch_rows = c.minibatch;
  spec.workspace.saved_rows = c.saved_rows;
  spec.deadlines = {60, 60};
  spec.repeat = 2;
  if (device == Device::cuda) {
    spec.device = device;
    const int n = std::min(gpu_count(), spec.ranks());
    for (int r = 0; r < spec.ranks(); ++r) spec.gpus.push_back(r * n / spec.ranks());
  }
  return spec;
}

struct Line {
  bool pass = true;
  std::string text;
};

Line run_case(const CheckCase& c, Spec spec, std::map<std::string, std::string>& digests) {
  std::optional<IdsFile> file;
  if (c.routing == "holes") file.emplace(c.shape, spec.global_tokens());
  spec.routing = problem::parse_routing(file ? "file:" + file->path() : c.routing);
  const problem::Problem problem = make_problem(spec, spec.seed);
  Progress silent;
  const Outcome outcome = run(spec, {&problem}, silent);
  const std::vector<CheckedTensor> checked = check(spec, problem, outcome, silent);
  Line line;
  double worst = 0;  // as a share of the tolerance
  std::string failed;
  for (const CheckedTensor& t : checked) {
    worst = std::max({worst, t.scaled_err / t.tolerance, t.whole_err / t.whole_tolerance});
    if (!t.pass) failed += std::string(" ") + to_string(t.out);
  }
  char text[64];
  std::snprintf(text, sizeof text, "error %.3f of the tolerance", worst);
  line.text = text;
  if (!failed.empty()) line.text += "; too far:" + failed;
  if (!outcome.changed.empty()) line.text += "; " + outcome.changed;
  line.pass = failed.empty() && outcome.changed.empty();
  if (c.same_bits.empty()) return line;
  std::string digest;
  for (int o = 0; o < kOuts; ++o) {
    if (!is_shared(static_cast<Out>(o)))
      digest += global_digest(spec, outcome, static_cast<Out>(o));
  }
  const auto [known, is_new] = digests.emplace(c.same_bits, digest);
  if (known->second != digest) {
    line.pass = false;
    line.text += "; other bits than the group's first";
  } else if (!is_new) {
    line.text += ", same bits";
  }
  return line;
}

int run_table(const Options& options) {
  const Device device = options.device == "cuda" ? Device::cuda : Device::cpu;
  if (device == Device::cuda) {
    const std::string missing = why_no_gpu();
    if (!missing.empty()) throw Error(ErrorCode::unsupported, "--device cuda: " + missing);
  }
  int failures = 0, done = 0;
  std::map<std::string, std::string> digests;
  const auto begin = std::chrono::steady_clock::now();
  for (const CheckCase& c : check_cases()) {
    if (!options.only.empty() && c.name.find(options.only) == std::string::npos) continue;
    const Spec spec = spec_of(c, device);
    if (device == Device::cuda && !cuda_refuses(spec).empty()) continue;
    Line line;
    try {
      line = run_case(c, spec, digests);
    } catch (const Error& e) {
      line = {false, std::string(to_string(e.code())) + ": " + e.what()};
    }
    std::printf("%-5s %-28s %-58s %s %s\n", line.pass ? "ok" : "FAIL", c.name.c_str(),
                shape_text(spec).c_str(), to_string(c.precision), line.text.c_str());
    std::fflush(stdout);
    ++done;
    failures += !line.pass;
  }
  require(done > 0, "--only", "'" + options.only + "' is in no name");
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%d cases on %s, %d failed, %.1f s\n", done, to_string(device), failures, seconds);
  return failures == 0 ? kFine : kCheckFailed;
}

}  // namespace

Command add_check(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("--device", options->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->type_name("D");
  app.add_option("--only", options->only, "lines whose name contains this")->type_name("TEXT");
  return [options] { return run_table(*options); };
}

}  // namespace mok::cli
