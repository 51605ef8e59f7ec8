// mok plan: what is done, in how many tasks, over which links, in which memory.
#include <cstdio>
#include <iostream>
#include <memory>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/json.h"
#include "cli/plan_facts.h"

namespace mok::cli {
namespace {

using plan::Direction;
using plan::Queue;

struct Options {
  Arguments arguments;
  bool validate = false, json = false;
};

const char* name(Direction d) { return d == Direction::forward ? "forward" : "backward"; }

std::vector<int64_t> tasks_by_kind(const plan::HostPlan& host) {
  std::vector<int64_t> count(plan::kTaskKinds, 0);
  const auto add = [&](const std::vector<plan::Phase>& phases, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
      count[static_cast<int>(phases[i].kind)] +=
          phases[i + 1].first_ticket - phases[i].first_ticket;
    }
  };
  add(host.compute, host.plan.compute_phases);
  add(host.communication, host.plan.communication_phases);
  return count;
}

struct Saved {
  int64_t rows, routed_bytes, shared_bytes;  // of a rank with max_tokens
};
Saved saved_for_backward(const Spec& spec, const plan::Geometry& g) {
  const int64_t element = element_size(spec.precision);
  const LayerShape& s = spec.shape;
  const int64_t rows = g.saved_rows;
  const int64_t shared = 2 * s.shared_intermediate + (s.shared_gate ? s.hidden : 0);
  return {rows, 2 * rows * s.intermediate * element, spec.workspace.max_tokens * shared * element};
}

Json rank_json(const plan::HostPlan& host) {
  const plan::Plan& p = host.plan;
  Json j;
  const int64_t padded = int64_t{p.s.tiles} * plan::kTileRows;
  j["rank"] = p.g.rank;
  j["rows"] = p.s.real_rows;
  j["padding_share"] = padded == 0 ? 0.0 : 1 - static_cast<double>(p.s.real_rows) / padded;
  j["tiles"] = p.s.tiles;
  j["minibatches"] = p.s.minibatches;
  j["windows"] = p.s.windows;
  const std::vector<int64_t> tasks = tasks_by_kind(host);
  for (int k = 0; k < plan::kTaskKinds; ++k) {
    if (tasks[k] > 0) j["tasks"][plan::to_string(static_cast<plan::TaskKind>(k))] = tasks[k];
  }
  return j;
}

Json links_json(const Links& l, int ranks) {
  Json matrix = Json::array();
  for (int from = 0; from < ranks; ++from) {
    matrix.push_back(std::vector<int64_t>(l.bytes[from].begin(), l.bytes[from].begin() + ranks));
  }
  return matrix;
}

struct Direct {  // one direction
  Direction direction;
  Plans plans;
  Links links;
};

Json to_json(const Spec& spec, const std::vector<Direct>& all, const plan::Layout& layout,
             const std::vector<std::string>* violations) {
  const plan::Geometry& g = all[0].plans[0]->plan.g;
  Json j;
  j["shape"] = shape_json(spec);
  j["ep"] = spec.ranks();
  j["tokens"] = spec.tokens;
  j["precision"] = to_string(spec.precision);
  j["routing"] = problem::to_string(spec.routing);
  j["seed"] = spec.seed;
  j["ring_rows"] = g.ring_tiles * plan::kTileRows;
  j["minibatch_rows"] = g.minibatch_tiles * plan::kTileRows;
  const Rows r = rows(all[0].plans);
  j["rows"] = r.real;
  j["padding_share"] = r.padding_share();
  for (const Direct& d : all) {
    for (const auto& p : d.plans) j[name(d.direction)]["ranks"].push_back(rank_json(*p));
    j[name(d.direction)]["link_bytes"] = links_json(d.links, spec.ranks());  // [from][to]
  }
  for (int b = 0; b < plan::kBuffers; ++b) {
    if (layout.bytes[b] == 0) continue;
    const auto buffer = static_cast<plan::Buffer>(b);
    j["memory"][plan::is_symmetric(buffer) ? "symmetric" : "local"][to_string(buffer)] =
        layout.bytes[b];
  }
  j["memory_bytes"] = layout.symmetric_bytes + layout.local_bytes;
  const Saved saved = saved_for_backward(spec, g);
  j["saved_for_backward"] = {{"rows", saved.rows},
                             {"routed_bytes", saved.routed_bytes},
                             {"shared_bytes", saved.shared_bytes}};
  if (violations) {
    j["validate"] = {{"pass", violations->empty()}, {"violations", *violations}};
  }
  return j;
}

void print_direction(const Spec& spec, const Direct& d) {
  std::printf("\n%s\n  rank       rows  padding  tiles  minibatches  windows\n", name(d.direction));
  for (const auto& host : d.plans) {
    const plan::Schedule& s = host->plan.s;
    const int64_t padded = int64_t{s.tiles} * plan::kTileRows;
    std::printf("  %4d %10d %7.1f%% %6d %12d %8d\n", host->plan.g.rank, s.real_rows,
                padded == 0 ? 0.0 : 100.0 - 100.0 * s.real_rows / static_cast<double>(padded),
                s.tiles, s.minibatches, s.windows);
  }
  std::printf("  tasks of each rank\n");
  std::vector<std::vector<int64_t>> tasks;
  for (const auto& host : d.plans) tasks.push_back(tasks_by_kind(*host));
  for (int k = 0; k < plan::kTaskKinds; ++k) {
    int64_t sum = 0;
    for (const auto& of_rank : tasks) sum += of_rank[k];
    if (sum == 0) continue;
    std::printf("    %-20s", plan::to_string(static_cast<plan::TaskKind>(k)));
    for (const auto& of_rank : tasks) std::printf(" %9lld", static_cast<long long>(of_rank[k]));
    std::printf("\n");
  }
  if (spec.ranks() == 1) return;
  std::printf("  MiB per link (row: from, column: to)\n");
  for (int from = 0; from < spec.ranks(); ++from) {
    std::printf("    %4d", from);
    for (int to = 0; to < spec.ranks(); ++to) {
      std::printf(" %10.3f", static_cast<double>(d.links.bytes[from][to]) / 0x1p20);
    }
    std::printf("\n");
  }
}

void print_text(const Spec& spec, const std::vector<Direct>& all, const plan::Layout& layout,
                const std::vector<std::string>* violations) {
  const plan::Geometry& g = all[0].plans[0]->plan.g;
  const Rows r = rows(all[0].plans);
  std::printf("%s\n", shape_text(spec).c_str());
  std::printf("ep %d, %lld tokens, routing %s, %s\n", spec.ranks(),
              static_cast<long long>(spec.global_tokens()),
              problem::to_string(spec.routing).c_str(), to_string(spec.precision));
  std::printf("%lld rows, padding %.1f%%, ring %d rows, minibatch %d rows\n",
              static_cast<long long>(r.real), 100 * r.padding_share(),
              g.ring_tiles * plan::kTileRows, g.minibatch_tiles * plan::kTileRows);
  for (const Direct& d : all) print_direction(spec, d);
  std::printf("\nmemory of each rank (max_tokens %lld)\n",
              static_cast<long long>(spec.workspace.max_tokens));
  for (int b = 0; b < plan::kBuffers; ++b) {
    if (layout.bytes[b] == 0) continue;
    const auto buffer = static_cast<plan::Buffer>(b);
    std::printf("  %-9s %-16s %12.3f MiB\n", plan::is_symmetric(buffer) ? "symmetric" : "local",
                to_string(buffer), static_cast<double>(layout.bytes[b]) / 0x1p20);
  }
  std::printf("  %-26s %12.3f MiB\n", "all",
              static_cast<double>(layout.symmetric_bytes + layout.local_bytes) / 0x1p20);
  const Saved saved = saved_for_backward(spec, g);
  std::printf("saved for backward, by the caller: %.3f MiB (%lld rows)\n",
              static_cast<double>(saved.routed_bytes + saved.shared_bytes) / 0x1p20,
              static_cast<long long>(saved.rows));
  if (!violations) return;
  for (const std::string& v : *violations) std::printf("violation: %s\n", v.c_str());
  std::printf("validate: %s\n", violations->empty() ? "two calls, all holds" : "FAIL");
}

// The problem's two directions one after the other, or two forwards.
std::vector<std::string> validate(const Spec& spec, const RankIds& ids) {
  const Direction second = spec.backward ? Direction::backward : Direction::forward;
  plan::Calls calls;
  calls.push_back(make_plans(spec, ids, Direction::forward));
  calls.push_back(make_plans(spec, ids, second));
  std::vector<std::string> found;
  for (const auto& p : calls[0]) {
    for (const std::string& v : plan::validate_schedule(*p, ids.pointers())) found.push_back(v);
  }
  for (const std::string& v : plan::validate(plan::make_program(calls))) found.push_back(v);
  return found;
}

int print_plan(const Options& options) {
  const Spec spec = options.arguments.spec(Arguments::Use::plan);
  const problem::Problem problem = make_problem(spec, spec.seed);
  const RankIds ids(spec, problem);
  std::vector<Direct> all;
  for (const Direction d : {Direction::forward, Direction::backward}) {
    if (d == Direction::backward && !spec.backward) continue;
    Plans plans = make_plans(spec, ids, d);
    const Links l = links(spec, plans);
    all.push_back({d, std::move(plans), l});
  }
  const plan::Layout layout = plan::make_layout(
      all[0].plans[0]->plan.g, element_size(spec.precision), weight_size(spec.precision));
  std::vector<std::string> violations;
  if (options.validate) violations = validate(spec, ids);
  const auto* shown = options.validate ? &violations : nullptr;
  if (options.json) {
    std::cout << to_json(spec, all, layout, shown).dump(2) << "\n";
  } else {
    print_text(spec, all, layout, shown);
  }
  return violations.empty() ? kFine : kCheckFailed;
}

}  // namespace

Command add_plan(CLI::App& app) {
  auto options = std::make_shared<Options>();
  options->arguments.add_shape(app);
  options->arguments.add_problem(app);
  options->arguments.add_knobs(app);
  app.add_flag("--validate", options->validate, "proves the plan of two successive calls");
  app.add_flag("--json", options->json, "prints one JSON object");
  return [options] { return print_plan(*options); };
}

}  // namespace mok::cli
