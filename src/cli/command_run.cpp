// mok run: one problem, its digests, its errors against the oracle, its times.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/json.h"
#include "cli/results.h"

namespace mok::cli {
namespace {

struct Options {
  Arguments arguments;
  int64_t repeat = 1;
  bool check = false, json = false;
};

struct Report {
  const Spec& spec;
  const Outcome& outcome;
  const std::vector<CheckedTensor>* checked;  // null: not asked for
  double forward_ms, backward_ms;
  int64_t memory_bytes;  // of the rank that takes most
};

Json to_json(const Report& report) {
  const Spec& spec = report.spec;
  Json j;
  j["device"] = to_string(spec.device);
  j["ep"] = spec.ranks();
  j["tokens"] = spec.tokens;
  j["shape"] = shape_json(spec);
  j["precision"] = to_string(spec.precision);
  j["routing"] = problem::to_string(spec.routing);
  j["seed"] = spec.seed;
  j["pass"] = spec.backward ? "both" : "forward";
  if (spec.backward) j["grads"] = to_string(spec.grads);
  if (spec.device == Device::cuda) {
    j["gpus"] = spec.gpus;
    j["virtual"] = spec.is_virtual();
  } else {
    j["ranks"] = spec.processes ? "processes" : "threads";
  }
  for (int o = 0; o < kOuts; ++o) {
    const Out out = static_cast<Out>(o);
    if (is_shared(out) || (out != Out::y && !spec.backward)) continue;
    j["digest"][to_string(out)] = global_digest(spec, report.outcome, out);
  }
  if (spec.backward && spec.shape.shared_intermediate > 0) {
    for (int r = 0; r < spec.ranks(); ++r) {  // of the rank's own tokens
      Json rank;
      for (int o = 0; o < kOuts; ++o) {
        const Out out = static_cast<Out>(o);
        if (!is_shared(out) || extent(spec, r, out).elements() == 0) continue;
        rank[to_string(out)] = rank_digest(report.outcome, r, out);
      }
      j["digest_shared"].push_back(std::move(rank));
    }
  }
  if (report.checked) {
    Json& check = j["check"];
    for (const CheckedTensor& c : *report.checked) {
      check["max_rel_err"][to_string(c.out)] = c.max_rel_err;
      check["scaled_err"][to_string(c.out)] = c.scaled_err;
      check["tolerance"][to_string(c.out)] = c.tolerance;
      if (!is_quantized(spec.precision)) continue;
      check["whole_err"][to_string(c.out)] = c.whole_err;
      if (std::isfinite(c.whole_tolerance)) {
        check["whole_tolerance"][to_string(c.out)] = c.whole_tolerance;
      }
    }
    check["pass"] = all_pass(*report.checked);
  }
  j["repeat"] = spec.repeat;
  j["repeat_same_bits"] = report.outcome.changed.empty();
  j["time_ms"]["forward"] = report.forward_ms;
  if (spec.backward) j["time_ms"]["backward"] = report.backward_ms;
  if (is_quantized(spec.precision)) j["time_ms"]["quantize_weights"] = report.outcome.quantize_ms;
  j["memory_bytes"] = report.memory_bytes;
  return j;
}

void print_text(const Report& report) {
  const Spec& spec = report.spec;
  std::string tokens;
  for (const int64_t t : spec.tokens) tokens += (tokens.empty() ? "" : ",") + std::to_string(t);
  std::string where = to_string(spec.device);
  if (spec.device == Device::cuda) {
    where += spec.is_virtual() ? " (virtual ranks on " : " (";
    where += std::to_string(spec.physical_gpus()) + " GPU)";
  } else {
    where += spec.processes ? ", ranks are processes" : ", ranks are threads";
  }
  if (spec.backward && spec.grads != GradMode::sum) {
    where += std::string(", gradients ") + to_string(spec.grads);
  }
  std::printf("%s\n", shape_text(spec).c_str());
  if (!spec.note.empty()) std::printf("note: %s\n", spec.note.c_str());
  std::printf("ep %d, tokens %s, routing %s, seed %" PRIu64 ", %s, %s\n\n", spec.ranks(),
              tokens.c_str(), problem::to_string(spec.routing).c_str(), spec.seed,
              to_string(spec.precision), where.c_str());
  for (int o = 0; o < kOuts; ++o) {
    const Out out = static_cast<Out>(o);
    if (extent(spec, 0, out).columns == 0 ||
        (is_shared(out) && spec.shape.shared_intermediate == 0))
      continue;
    std::string text;
    if (is_shared(out)) {  // of each rank's own tokens
      if (extent(spec, 0, out).elements() == 0) continue;
      for (int r = 0; r < spec.ranks(); ++r) text += rank_digest(report.outcome, r, out) + " ";
    } else {
      text = global_digest(spec, report.outcome, out);
    }
    std::printf("digest  %-16s %s\n", to_string(out), text.c_str());
  }
  if (report.checked) {
    const bool whole = is_quantized(spec.precision);
    std::printf("\n        %-16s %12s %12s %12s%s\n", "", "max_rel_err", "scaled_err", "tolerance",
                whole ? "    whole_err    tolerance" : "");
    for (const CheckedTensor& c : *report.checked) {
      char of_whole[40] = "";
      if (whole) {
        std::snprintf(of_whole, sizeof of_whole, " %12.3e %12.3e", c.whole_err, c.whole_tolerance);
      }
      std::printf("check   %-16s %12.3e %12.3e %12.3e%s  %s\n", to_string(c.out), c.max_rel_err,
                  c.scaled_err, c.tolerance, of_whole, c.pass ? "pass" : "FAIL");
    }
  }
  std::printf("\nforward %.3f ms", report.forward_ms);
  if (spec.backward) std::printf(", backward %.3f ms", report.backward_ms);
  if (spec.repeat > 1) std::printf(" (median of %d)", spec.repeat);
  if (is_quantized(spec.precision)) {
    std::printf(", weights quantised in %.3f ms", report.outcome.quantize_ms);
  }
  std::printf(", workspace %.1f MiB a rank\n", static_cast<double>(report.memory_bytes) / 0x1p20);
  if (!report.outcome.changed.empty()) std::printf("FAIL    %s\n", report.outcome.changed.c_str());
}

int run_problem(const Options& options) {
  Spec spec = options.arguments.spec(Arguments::Use::execution);
  require(options.repeat >= 1 && options.repeat <= 1000000, "--repeat",
          std::to_string(options.repeat) + " is outside 1..1000000");
  spec.repeat = static_cast<int>(options.repeat);
  const problem::Problem problem = make_problem(spec, spec.seed);

  Progress progress;
  const Outcome outcome = run(spec, {&problem}, progress);
  std::vector<CheckedTensor> checked;
  if (options.check) checked = check(spec, problem, outcome, progress);
  Report report{spec,
                outcome,
                options.check ? &checked : nullptr,
                median(outcome.forward_ms),
                median(outcome.backward_ms),
                *std::max_element(outcome.memory_bytes.begin(), outcome.memory_bytes.end())};
  if (options.json) {
    std::cout << to_json(report).dump(2) << "\n";
  } else {
    print_text(report);
  }
  return all_pass(checked) && outcome.changed.empty() ? kFine : kCheckFailed;
}

}  // namespace

Command add_run(CLI::App& app) {
  auto options = std::make_shared<Options>();
  options->arguments.add_shape(app);
  options->arguments.add_problem(app);
  options->arguments.add_knobs(app);
  options->arguments.add_execution(app);
  app.add_option("--repeat", options->repeat, "calls; times are medians, bits must not change")
      ->type_name("N");
  app.add_flag("--check", options->check, "compares with the float64 oracle");
  app.add_flag("--json", options->json, "prints one JSON object");
  return [options] { return run_problem(*options); };
}

}  // namespace mok::cli
