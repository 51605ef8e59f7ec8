#include "plan/validate.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

namespace mok::plan {

namespace {

std::string describe(const Node& n) {
  static constexpr const char* kKinds[] = {"arrive", "schedule", "", "leave"};
  std::string text = "call " + std::to_string(n.call) + " rank " + std::to_string(n.rank) + " ";
  if (n.kind != Node::Kind::task) return text + kKinds[static_cast<int>(n.kind)];
  return text + to_string(n.task.kind) + " (minibatch " + std::to_string(n.task.minibatch) +
         ", tile " + std::to_string(n.task.tile) + ", column " + std::to_string(n.task.column) +
         ", ticket " + std::to_string(n.ticket) + ")";
}

// Tasks are vertices 0..n-1; each counter that somebody waits for is one more vertex between its
// signallers and its waiters, and so is the begin of a rank's call.
class Checker {
 public:
  Checker(const Program& program, int limit)
      : program_(program), limit_(static_cast<size_t>(limit)), nodes_(program.nodes.size()) {}

  std::vector<std::string> run() {
    connect_counters();
    connect_calls();
    check_order();
    if (errors_.empty()) check_memory();
    check_outputs();
    return errors_;
  }

 private:
  using CounterKey = std::tuple<int, int, Counter, int32_t>;  // call, rank, counter, index

  void error(const std::string& text) {
    if (errors_.size() < limit_) errors_.push_back(text);
  }

  size_t add_vertex() {
    successors_.emplace_back();
    return successors_.size() - 1;
  }

  void connect_counters() {
    successors_.resize(nodes_);
    std::map<CounterKey, std::vector<size_t>> signallers;
    for (size_t n = 0; n < nodes_; ++n) {
      const Node& node = program_.nodes[n];
      for (const Wait& s : node.signals) {
        if (!is_flag(s.counter)) {
          signallers[{node.call, node.rank, s.counter, s.index}].push_back(n);
          continue;
        }
        for (int r = 0; r < program_.ranks; ++r) {
          signallers[{node.call, r, s.counter, s.index}].push_back(n);
        }
      }
    }
    std::map<CounterKey, size_t> vertex;
    for (size_t n = 0; n < nodes_; ++n) {
      const Node& node = program_.nodes[n];
      for (const Wait& w : node.waits) {
        const CounterKey key{node.call, node.rank, w.counter, w.index};
        const auto found = signallers.find(key);
        const size_t signals = found == signallers.end() ? 0 : found->second.size();
        if (signals != static_cast<size_t>(w.target)) {
          error("counter: " + describe(node) + " waits for " + to_string(w.counter) + "[" +
                std::to_string(w.index) + "] = " + std::to_string(w.target) + ", but " +
                std::to_string(signals) + " signals reach it");
        }
        if (signals == 0) continue;
        const auto [entry, fresh] = vertex.try_emplace(key, 0);
        if (fresh) {
          entry->second = add_vertex();
          for (const size_t s : found->second) successors_[s].push_back(entry->second);
        }
        successors_[entry->second].push_back(n);
      }
    }
    connect_joined(vertex);
  }

  // A kernel may compute a tile of a minibatch together with the next one's rows (tall tiles): then
  // it waits for what either waits for.
  void connect_joined(const std::map<CounterKey, size_t>& vertex) {
    using TileKey = std::tuple<int, int, TaskKind, int, int, int>;
    const auto key = [](const Node& n, int tile) {
      return TileKey{n.call, n.rank, n.task.kind, n.task.minibatch, n.task.column, tile};
    };
    const auto may_join = [](const Node& n) {
      const TaskKind kind = n.task.kind;
      return n.kind == Node::Kind::task &&
             (kind == TaskKind::gate_up || kind == TaskKind::down || kind == TaskKind::d_hidden ||
              kind == TaskKind::d_input);
    };
    std::map<TileKey, size_t> node_of;  // a tile's task comes after that of the tile before
    for (size_t n = 0; n < nodes_; ++n) {
      const Node& node = program_.nodes[n];
      if (!may_join(node)) continue;
      node_of[key(node, node.task.tile)] = n;
      const auto before = node_of.find(key(node, node.task.tile - 1));
      if (before == node_of.end()) continue;
      for (const Wait& w : node.waits) {
        const auto counter = vertex.find({node.call, node.rank, w.counter, w.index});
        if (counter != vertex.end()) joined_.emplace_back(counter->second, before->second);
      }
    }
  }

  // schedule -> every task of the rank's call -> leave -> arrive of its next call.
  void connect_calls() {
    std::map<std::pair<int, int>, std::vector<size_t>> of_call;
    for (size_t n = 0; n < nodes_; ++n) {
      of_call[{program_.nodes[n].rank, program_.nodes[n].call}].push_back(n);
    }
    for (const auto& [key, members] : of_call) {
      const size_t arrive = members[0], schedule = members[1], leave = members.back();
      successors_[arrive].push_back(schedule);
      for (size_t i = 2; i + 1 < members.size(); ++i) {
        successors_[schedule].push_back(members[i]);
        successors_[members[i]].push_back(leave);
      }
      successors_[schedule].push_back(leave);
      const auto next = of_call.find({key.first, key.second + 1});
      if (next != of_call.end()) successors_[leave].push_back(next->second[0]);
    }
  }

  // Kahn's algorithm on waits and queues; the queue edges are for progress only: they do not order
  // memory, because several workers run the tasks of one queue at once. Nor do those of joined
  // tiles, which need not be joined.
  void check_order() {
    auto edges = successors_;
    for (const auto& [counter, task] : joined_) edges[counter].push_back(task);
    std::map<std::tuple<int, int, Queue>, size_t> last;
    for (size_t n = 0; n < nodes_; ++n) {
      const Node& node = program_.nodes[n];
      if (node.kind != Node::Kind::task) continue;
      const auto [entry, fresh] = last.try_emplace({node.call, node.rank, node.queue}, n);
      if (!fresh) edges[entry->second].push_back(n);
      entry->second = n;
    }
    std::vector<int> missing(edges.size(), 0);
    for (const auto& out : edges) {
      for (const size_t v : out) ++missing[v];
    }
    for (size_t v = 0; v < edges.size(); ++v) {
      if (missing[v] == 0) order_.push_back(v);
    }
    for (size_t i = 0; i < order_.size(); ++i) {
      for (const size_t v : edges[order_[i]]) {
        if (--missing[v] == 0) order_.push_back(v);
      }
    }
    if (order_.size() == edges.size()) return;
    for (size_t n = 0; n < nodes_; ++n) {
      if (missing[n] > 0) {
        error("order: no total order; the first task that cannot run is " +
              describe(program_.nodes[n]));
        return;
      }
    }
  }

  bool ordered(size_t from, size_t to) const {
    return before_[to * words_ + from / 64] >> (from % 64) & 1;
  }

  void check_memory() {
    words_ = (nodes_ + 63) / 64;
    before_.assign(successors_.size() * words_, 0);
    for (const size_t v : order_) {  // bit set of the tasks that are done before v begins
      for (const size_t next : successors_[v]) {
        uint64_t* out = &before_[next * words_];
        const uint64_t* in = &before_[v * words_];
        for (size_t w = 0; w < words_; ++w) out[w] |= in[w];
        if (v < nodes_) out[v / 64] |= uint64_t{1} << (v % 64);
      }
    }
    struct Use {
      size_t node;
      int64_t version;
      bool write;
    };
    std::unordered_map<uint64_t, std::vector<Use>> uses;
    for (size_t n = 0; n < nodes_; ++n) {
      for (const Access& a : program_.nodes[n].accesses) {
        uses[a.cell].push_back({n, a.version, a.write});
      }
    }
    for (const auto& [cell, list] : uses) {
      const std::string where = describe_cell(cell);
      std::vector<Use> writes;
      std::copy_if(list.begin(), list.end(), std::back_inserter(writes),
                   [](const Use& u) { return u.write; });
      for (const Use& use : list) {
        const Use* seen = nullptr;
        for (const Use& w : writes) {
          if (w.node == use.node) continue;
          const bool earlier = ordered(w.node, use.node);
          if (!earlier && !ordered(use.node, w.node)) {
            error("memory: " + where + ": no order between the write of " +
                  describe(program_.nodes[w.node]) + " and " + describe(program_.nodes[use.node]));
          }
          if (earlier && (seen == nullptr || ordered(seen->node, w.node))) seen = &w;
        }
        if (use.write) continue;
        if (seen == nullptr || seen->version != use.version) {
          error("memory: " + where + ": " + describe(program_.nodes[use.node]) + " reads " +
                (seen == nullptr ? std::string("before any write")
                                 : "what " + describe(program_.nodes[seen->node]) + " wrote"));
        }
      }
    }
  }

  void check_outputs() {
    std::unordered_map<uint64_t, int> written;
    for (const uint64_t cell : program_.outputs) written[cell] = 0;
    for (const Node& node : program_.nodes) {
      for (const Access& a : node.accesses) {
        if ((a.cell >> 52 & 0xff) < static_cast<uint64_t>(kBuffers)) continue;
        const auto found = written.find(a.cell);
        if (found == written.end()) {
          error("outputs: " + describe(node) + " writes " + describe_cell(a.cell) +
                ", which is no output");
        } else {
          ++found->second;
        }
      }
    }
    for (const auto& [cell, times] : written) {
      if (times != 1) {
        error("outputs: " + describe_cell(cell) + " is written " + std::to_string(times) +
              " times");
      }
    }
  }

  static std::string describe_cell(uint64_t cell) {
    const int memory = static_cast<int>(cell >> 52 & 0xff);
    const std::string name = memory < kBuffers ? to_string(static_cast<Buffer>(memory))
                                               : "output " + std::to_string(memory - kBuffers);
    return name + " of rank " + std::to_string(cell >> 60) + " [" +
           std::to_string(cell >> 20 & 0xffffffff) + ", " + std::to_string(cell & 0xfffff) + "]";
  }

  const Program& program_;
  size_t limit_;
  size_t nodes_;
  std::vector<std::vector<size_t>> successors_;
  std::vector<std::pair<size_t, size_t>> joined_;  // counter, task
  std::vector<size_t> order_;
  size_t words_ = 0;
  std::vector<uint64_t> before_;  // [vertices][words]
  std::vector<std::string> errors_;
};

}  // namespace

std::vector<std::string> validate_schedule(const HostPlan& host, const int32_t* const* ids) {
  const Geometry& g = host.plan.g;
  const HostSchedule& s = host.schedule;
  std::vector<std::string> errors;
  const auto check = [&](bool holds, const std::string& what, int64_t where) {
    if (!holds && errors.size() < 20) errors.push_back(what + " " + std::to_string(where));
  };
  int64_t rows = 0;
  for (int e = 0; e < g.experts_local(); ++e) {
    int32_t previous = -1;
    for (int32_t row = s.expert_begin[e]; row < s.expert_begin[e + 1]; ++row) {
      const int32_t slot = s.row_slot[row];
      check((slot >= 0) == (row < s.expert_begin[e] + s.expert_rows[e]), "padding: row", row);
      if (slot < 0) continue;
      ++rows;
      const int32_t id = ids[g.slot_rank(slot)][g.owner_index(slot)];
      check(id == g.first_expert() + e, "row of another expert: row", row);
      check(slot > previous, "rows out of token order: row", row);
      check(s.slot_row[slot] == row, "inverse table: slot", slot);
      previous = slot;
    }
  }
  int64_t routed = 0;
  for (int r = 0; r < g.ranks; ++r) {
    for (int64_t i = 0; i < int64_t{g.tokens[r]} * g.topk; ++i) {
      const int32_t local = ids[r][i] - g.first_expert();
      routed += local >= 0 && local < g.experts_local();
    }
  }
  check(rows == routed, "rows in all", rows);
  return errors;
}

std::vector<std::string> validate(const Program& program, int limit) {
  return Checker(program, limit).run();
}

}  // namespace mok::plan
