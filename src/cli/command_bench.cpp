// mok bench: times over shapes and routings.
#include <cstdio>
#include <iostream>
#include <memory>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/cuda_support.h"
#include "cli/json.h"
#include "cli/plan_facts.h"
#include "cli/results.h"

namespace mok::cli {
namespace {

struct Options {
  Arguments arguments;
  int64_t repeat = 0, warm_up = -1, sets = 2;
  bool json = false;
};

struct Timing {  // of a direction, or of both
  double ms = 0;
  double tflops = 0;  // of each GPU (of the machine on the CPU)
};

struct Result {
  Timing forward, backward, both;
  double fastest_ms = 0, slowest_ms = 0;  // forward
  double quantize_ms = 0;                 // of the weights, once
  int64_t rows = 0, link_bytes = 0, busiest_bytes = 0;
  double link_gb_per_s = 0, padding_share = 0;
  int64_t workspace_bytes = 0, peak_bytes = 0;
};

Result measure(Spec spec, const Options& options, Progress& progress) {
  std::vector<problem::Problem> problems;
  for (int64_t i = 0; i < options.sets; ++i) {
    problems.push_back(make_problem(spec, spec.seed + static_cast<uint64_t>(i)));
  }
  Sets sets;
  for (const problem::Problem& p : problems) sets.push_back(&p);
  const Outcome outcome = run(spec, sets, progress);

  Result r;
  const auto [low, high] =
      std::minmax_element(outcome.forward_ms.begin(), outcome.forward_ms.end());
  r.quantize_ms = outcome.quantize_ms;
  r.fastest_ms = *low;
  r.slowest_ms = *high;
  const RankIds ids(spec, problems[0]);
  const Plans plans = make_plans(spec, ids, plan::Direction::forward);
  const Rows counted = rows(plans);
  r.rows = counted.real;
  r.padding_share = counted.padding_share();
  const Links l = links(spec, plans, spec.gpus);
  r.link_bytes = l.total();
  r.busiest_bytes = l.busiest();
  const LayerShape& s = spec.shape;
  const double operations =
      6.0 * static_cast<double>(s.hidden) *
      (static_cast<double>(r.rows) * static_cast<double>(s.intermediate) +
       static_cast<double>(spec.global_tokens()) * static_cast<double>(s.shared_intermediate));
  const int machines = spec.device == Device::cuda ? spec.physical_gpus() : 1;
  // Backward has two products for each of forward's; what is recomputed does not count.
  const auto timing = [&](const std::vector<double>& ms, double products) {
    const double middle = median(ms);
    return Timing{middle, middle > 0 ? products * operations / machines / middle / 1e9 : 0};
  };
  r.forward = timing(outcome.forward_ms, 1);
  if (spec.backward) {
    std::vector<double> both = outcome.forward_ms;
    for (size_t i = 0; i < both.size(); ++i) both[i] += outcome.backward_ms[i];
    r.backward = timing(outcome.backward_ms, 2);
    r.both = timing(both, 3);
  }
  r.link_gb_per_s = static_cast<double>(r.busiest_bytes) / 1e6 / r.forward.ms;
  for (int rank = 0; rank < spec.ranks(); ++rank) {
    r.workspace_bytes = std::max(r.workspace_bytes, outcome.memory_bytes[rank]);
    r.peak_bytes = std::max(r.peak_bytes, outcome.memory_bytes[rank] + outcome.tensor_bytes[rank]);
  }
  return r;
}

Json to_json(const Spec& spec, const Result& r) {
  Json j;
  j["shape"] = shape_json(spec);
  j["tokens"] = spec.tokens;
  j["routing"] = problem::to_string(spec.routing);
  j["rows"] = r.rows;
  j["padding_share"] = r.padding_share;
  j["time_ms"] = {{"forward", r.forward.ms}, {"min", r.fastest_ms}, {"max", r.slowest_ms}};
  if (is_quantized(spec.precision)) j["time_ms"]["quantize_weights"] = r.quantize_ms;
  j["tflops"]["forward"] = r.forward.tflops;
  if (spec.backward) {
    j["time_ms"]["backward"] = r.backward.ms;
    j["time_ms"]["both"] = r.both.ms;
    j["tflops"]["backward"] = r.backward.tflops;
    j["tflops"]["both"] = r.both.tflops;
  }
  j["link_bytes"] = r.link_bytes;
  j["link_bytes_busiest_rank"] = r.busiest_bytes;
  j["link_gb_per_s"] = r.link_gb_per_s;
  j["workspace_bytes"] = r.workspace_bytes;
  j["peak_bytes"] = r.peak_bytes;
  return j;
}

void print_head(const Spec& spec) {
  const std::string grads =
      spec.backward ? std::string(", gradients ") + to_string(spec.grads) : "";
  std::printf("%s, ep %d%s, %s%s, %d calls after %d\n", to_string(spec.device), spec.ranks(),
              spec.is_virtual() ? " (virtual)" : "", to_string(spec.precision), grads.c_str(),
              spec.repeat, spec.warm_up);
  std::printf("%-18s %-11s %8s %10s %9s%s %9s %8s %8s %9s\n", "model", "routing", "tokens",
              "forward ms", "TFLOP/s",
              spec.backward ? "  backw. ms   TFLOP/s    both ms   TFLOP/s" : "", "link MB", "GB/s",
              "padding", "peak GiB");
}

void print_line(const Spec& spec, const Result& r) {
  char backward[64] = "";
  if (spec.backward) {
    std::snprintf(backward, sizeof backward, " %10.3f %9.3f %10.3f %9.3f", r.backward.ms,
                  r.backward.tflops, r.both.ms, r.both.tflops);
  }
  std::printf("%-18s %-11s %8lld %10.3f %9.3f%s %9.2f %8.2f %7.1f%% %9.2f\n",
              spec.model.empty() ? "-" : spec.model.c_str(),
              problem::to_string(spec.routing).c_str(),
              static_cast<long long>(spec.workspace.max_tokens), r.forward.ms, r.forward.tflops,
              backward, static_cast<double>(r.busiest_bytes) / 1e6, r.link_gb_per_s,
              100 * r.padding_share, static_cast<double>(r.peak_bytes) / 0x1p30);
  if (is_quantized(spec.precision)) {
    std::printf("%-18s weights quantised once, not in the times: %.3f ms\n", "", r.quantize_ms);
  }
  std::fflush(stdout);
}

int run_bench(Options options) {
  Arguments& a = options.arguments;
  const bool gpu = a.device != "cpu" && why_no_gpu().empty();
  if (a.pass.empty()) a.pass = "forward";
  const bool sizes = a.has_sizes();
  if (a.model.empty() && !sizes) {
    a.model = gpu ? "qwen3-30b-a3b,qwen3-235b-a22b,deepseek-v3,mixtral-8x7b,gpt-oss-120b"
                  : "qwen3-30b-a3b";
  }
  const bool default_tokens = a.tokens.empty();
  if (default_tokens) a.tokens = gpu ? "8192" : "128";
  if (options.repeat == 0) options.repeat = gpu ? 20 : 3;
  if (options.warm_up < 0) options.warm_up = gpu ? 5 : 1;
  require(options.repeat >= 1 && options.repeat <= 100000, "--repeat", "is outside 1..100000");
  require(options.warm_up <= 100000, "--warm-up", "is above 100000");
  require(options.sets >= 1 && options.sets <= 16, "--sets", "is outside 1..16");

  // Everything is checked before anything is run.
  std::vector<Spec> specs;
  for (const std::string& model : split(a.model, ',')) {
    for (const std::string& routing : split(a.routing, ',')) {
      Arguments one = a.with(model, routing);
      Spec spec = one.spec(Arguments::Use::execution);
      if (default_tokens && gpu && spec.shape.hidden > 7000) {
        one.tokens = "4096";  // what these models' figures are stated for
        spec = one.spec(Arguments::Use::execution);
      }
      spec.repeat = static_cast<int>(options.repeat);
      spec.warm_up = static_cast<int>(options.warm_up);
      spec.compare_bits = false;
      // What others' products write (bench/products_only.py).
      if (a.grads.empty() && storage_type(spec.precision) == Precision::bf16)
        spec.grads = GradMode::storage;
      make_problem(spec, spec.seed);
      specs.push_back(std::move(spec));
    }
  }
  Progress progress;
  Json results = Json::array();
  int failed = 0;
  if (!options.json) print_head(specs[0]);
  for (const Spec& spec : specs) {
    Result result;
    std::string error;
    try {
      result = measure(spec, options, progress);
    } catch (const Error& e) {  // the other lines are worth having
      error = std::string(to_string(e.code())) + ": " + e.what();
      ++failed;
    }
    progress.clear();
    if (options.json) {
      Json line = error.empty() ? to_json(spec, result) : Json{{"shape", shape_json(spec)}};
      if (!error.empty()) line["error"] = error;
      results.push_back(std::move(line));
    } else if (error.empty()) {
      print_line(spec, result);
    } else {
      std::printf("%-18s %-11s %s\n", spec.model.c_str(), problem::to_string(spec.routing).c_str(),
                  error.c_str());
    }
  }
  if (options.json) {
    const Spec& first = specs[0];
    Json j;
    j["device"] = to_string(first.device);
    j["ep"] = first.ranks();
    j["precision"] = to_string(first.precision);
    if (first.backward) j["grads"] = to_string(first.grads);
    if (first.device == Device::cuda) {
      j["gpus"] = first.gpus;
      j["virtual"] = first.is_virtual();
    }
    j["repeat"] = first.repeat;
    j["warm_up"] = first.warm_up;
    j["sets"] = options.sets;
    j["results"] = std::move(results);
    std::cout << j.dump(2) << "\n";
  }
  if (failed > 0) {
    throw Error(ErrorCode::internal,
                std::to_string(failed) + " of the lines could not be measured");
  }
  return kFine;
}

}  // namespace

Command add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  options->arguments.routing = "uniform,zipf:1.2,one-expert";
  options->arguments.add_shape(app);
  options->arguments.add_problem(app);
  options->arguments.add_knobs(app);
  options->arguments.add_execution(app);
  app.add_option("--repeat", options->repeat, "timed calls (default: 20 on CUDA, 3 on the CPU)")
      ->type_name("N");
  app.add_option("--warm-up", options->warm_up, "calls before (default: 5 on CUDA, 1 on the CPU)")
      ->type_name("N");
  app.add_option("--sets", options->sets, "sets of tokens that calls take in turn")->type_name("N");
  app.add_flag("--json", options->json, "prints one JSON object");
  app.footer("--model and --routing take lists here: a,b,c");
  return [options] { return run_bench(*options); };
}

}  // namespace mok::cli
