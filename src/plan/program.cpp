// Writes down every task of every rank: see validate.h.
#include "plan/validate.h"

#include <algorithm>
#include <numeric>

namespace mok::plan {

HostPlan::HostPlan(const Geometry& g, const int32_t* const* ids)
    : schedule(build_schedule(g, ids)) {
  plan.g = g;
  plan.s = schedule.view();
  compute.resize(most_phases(g));
  communication.resize(most_phases(g));
  plan.compute_phases = build_phases(plan, Queue::compute, compute.data());
  plan.communication_phases = build_phases(plan, Queue::communication, communication.data());
  plan.compute = compute.data();
  plan.communication = communication.data();
}

std::vector<std::unique_ptr<HostPlan>> make_plans(const Geometry& base, const int32_t* const* ids) {
  std::vector<std::unique_ptr<HostPlan>> plans;
  for (int r = 0; r < base.ranks; ++r) {
    Geometry g = base;
    g.rank = r;
    plans.push_back(std::make_unique<HostPlan>(g, ids));
  }
  return plans;
}

namespace {

constexpr int kInterBlock = std::gcd(kTileInter, kTileDHidden);
static_assert(kTileDHiddenFp8 % kInterBlock == 0);

// Output cells follow the buffers in the numbering of memory kinds.
constexpr int kOutputBase = kBuffers;

uint64_t cell(int rank, int memory, int64_t i, int64_t j) {
  return (static_cast<uint64_t>(rank) << 60) | (static_cast<uint64_t>(memory) << 52) |
         (static_cast<uint64_t>(i) << 20) | static_cast<uint64_t>(j);
}

// The memory that one task touches. Columns of H are column tiles; columns of I are blocks of
// kInterBlock, because tiles of gate_up and of d_hidden differ in width. Ring rows are single rows
// where they are fetched and whole tiles where tiles write them.
class Accesses {
 public:
  Accesses(const Plan& p, int call, std::vector<Access>& out) : p_(p), call_(call), out_(out) {}

  void of_task(const Task& t);

 private:
  const Geometry& g() const { return p_.g; }
  int64_t version(int64_t what) const { return (static_cast<int64_t>(call_) << 40) | what; }
  void read(Buffer b, int64_t i, int64_t j, int64_t what, int rank = -1) {
    out_.push_back(
        {cell(rank < 0 ? g().rank : rank, static_cast<int>(b), i, j), version(what), false});
  }
  void write(Buffer b, int64_t i, int64_t j, int64_t what, int rank = -1) {
    out_.push_back(
        {cell(rank < 0 ? g().rank : rank, static_cast<int>(b), i, j), version(what), true});
  }
  void output(Output o, int64_t i, int64_t j) {
    // Each call has outputs of its own: the call is part of the cell.
    out_.push_back({cell(g().rank, kOutputBase + static_cast<int>(o), i * 8 + call_, j), 0, true});
  }
  template <class F>
  void columns(int n, F&& f) {
    for (int c = 0; c < n; ++c) f(c);
  }
  // Blocks of all `inter` columns, and those of one tile of columns.
  template <class F>
  void inter_blocks(int inter, F&& f) {
    columns(ceil_div(inter, kInterBlock), f);
  }
  template <class F>
  void inter_blocks(int inter, int tile_width, int tile, F&& f) {
    const int end = std::min(inter, (tile + 1) * tile_width);
    for (int c = tile * tile_width / kInterBlock; c * kInterBlock < end; ++c) f(c);
  }
  int64_t ring_tile(int tile) const { return tile % g().ring_tiles; }
  template <class F>
  void valid_rows(int tile, F&& f) {
    for (int r = 0; r < p_.s.tile[tile].rows; ++r) f(tile * kTileRows + r);
  }
  void read_rows(Buffer b, int tile) {
    valid_rows(tile, [&](int32_t row) { read(b, ring_row(p_, row), 0, row); });
  }
  void fetch(const Task& t);
  void push_rows(const Task& t);
  void weight_grad(const Task& t);
  void reduce(const Task& t);

  const Plan& p_;
  int call_;
  std::vector<Access>& out_;
};

void Accesses::fetch(const Task& t) {
  const bool backward = g().direction == Direction::backward;
  for (int32_t i = t.begin; i < t.end; ++i) {
    const int32_t slot = p_.s.row_slot[p_.s.fetch_row[i]];
    const int src = g().slot_rank(slot);
    const int token = g().slot_token(slot);
    if (src != g().rank) {
      read(Buffer::staged_x, token, 0, token, src);
      if (backward) read(Buffer::staged_d_y, token, 0, token, src);
    }
    for_each_stored_row(g(), p_.s, p_.s.fetch_row[i], [&](int32_t row) {
      write(Buffer::ring_x, ring_row(p_, row), 0, row);
      if (backward) write(Buffer::ring_d_y, ring_row(p_, row), 0, row);
    });
  }
}

void Accesses::push_rows(const Task& t) {
  valid_rows(t.tile, [&](int32_t row) {
    const int32_t slot = p_.s.row_slot[row];
    write(Buffer::returned_rows, g().owner_index(slot), t.column, slot, g().slot_rank(slot));
  });
}

void Accesses::weight_grad(const Task& t) {
  const Segment& segment = p_.s.segment[t.tile];
  const bool down = t.matrix == WeightMatrix::down;
  for (int tile = segment.first_tile; tile < segment.first_tile + segment.tiles; ++tile) {
    read_rows(down ? Buffer::ring_d_y : Buffer::ring_x, tile);
    const Buffer inter = down                             ? Buffer::ring_hidden
                         : t.matrix == WeightMatrix::gate ? Buffer::ring_d_gate
                                                          : Buffer::ring_d_up;
    inter_blocks(g().intermediate, [&](int c) { read(inter, ring_tile(tile), c, tile); });
  }
  const int64_t carry_row = static_cast<int64_t>(t.matrix) * 1024 + t.row_block;
  if (segment.previous >= 0) read(Buffer::carry, carry_row, t.column, segment.previous);
  if (!segment.last) write(Buffer::carry, carry_row, t.column, t.tile);
  if (segment.last) {
    output(Output::weight_grad, int64_t{segment.expert} * 4096 + carry_row, t.column);
  }
}

void Accesses::reduce(const Task& t) {
  const bool forward = g().direction == Direction::forward;
  for (int token = t.begin; token < t.end; ++token) {
    for (int k = 0; k < g().topk; ++k) {
      const int32_t slot = g().slot(g().rank, token, k);
      // Which slots route somewhere is known from the ranks' inverse tables; the owner knows its
      // ids. Here: `routed` is filled in by make_program through slot versions.
      if (forward || g().wanted.d_x) {
        columns(g().columns_hidden(),
                [&](int c) { read(Buffer::returned_rows, g().owner_index(slot), c, slot); });
      }
      if (!forward && g().wanted.d_topk_weights) {
        read(Buffer::returned_grads, g().owner_index(slot), 0, slot);
      }
    }
    output(Output::y, token, 0);
    if (!forward) output(Output::d_topk_weights, token, 0);
    if (g().has_shared() && (forward || g().wanted.d_x)) {
      columns(g().columns_hidden(),
              [&](int c) { read(Buffer::shared_rows, token / kTileRows, c, forward ? 0 : 1); });
    }
    if (g().shared_gate) read(Buffer::sigma, token / kTileRows, 0, 0);
  }
}

void Accesses::of_task(const Task& t) {
  const bool forward = g().direction == Direction::forward;
  const int inter = g().intermediate, hidden = g().columns_hidden();
  const int shared = g().shared_intermediate;
  switch (t.kind) {
    case TaskKind::stage:
      for (int token = t.begin; token < t.end; ++token) {
        write(Buffer::staged_x, token, 0, token);
        if (!forward) write(Buffer::staged_d_y, token, 0, token);
      }
      break;
    case TaskKind::fetch:
      fetch(t);
      break;
    case TaskKind::sigma:
      write(Buffer::sigma, t.tile, 0, 0);
      if (!forward && !g().keep_shared) {
        columns(hidden, [&](int c) { read(Buffer::shared_rows, t.tile, c, 0); });
      }
      break;
    case TaskKind::shared_gate_up:
      inter_blocks(shared, kTileInter, t.column, [&](int c) {
        write(forward ? Buffer::shared_hidden : Buffer::shared_gate, t.tile, c, 0);
        // Recomputing r_s needs h as well, before d_hidden's rows take its place.
        if (!forward && g().shared_gate) write(Buffer::shared_hidden, t.tile, c, 0);
      });
      break;
    case TaskKind::shared_down:
      inter_blocks(shared, [&](int c) { read(Buffer::shared_hidden, t.tile, c, 0); });
      write(Buffer::shared_rows, t.tile, t.column, 0);
      break;
    case TaskKind::gate_up:
      read_rows(Buffer::ring_x, t.tile);
      inter_blocks(inter, kTileInter, t.column, [&](int c) {
        write(forward ? Buffer::ring_hidden : Buffer::ring_gate, ring_tile(t.tile), c, t.tile);
      });
      break;
    case TaskKind::down:
      inter_blocks(inter, [&](int c) { read(Buffer::ring_hidden, ring_tile(t.tile), c, t.tile); });
      push_rows(t);
      break;
    case TaskKind::reduce:
      reduce(t);
      break;
    case TaskKind::d_hidden:
      read_rows(Buffer::ring_d_y, t.tile);
      inter_blocks(inter, g().tile_d_hidden, t.column, [&](int c) {
        if (!is_saved(p_, t.tile)) read(Buffer::ring_gate, ring_tile(t.tile), c, t.tile);
        for (const Buffer b : {Buffer::ring_hidden, Buffer::ring_d_gate, Buffer::ring_d_up}) {
          write(b, ring_tile(t.tile), c, t.tile);
        }
      });
      write(Buffer::router_partials, ring_tile(t.tile), t.column, t.tile);
      break;
    case TaskKind::router_grad:
      columns(g().columns_d_hidden(),
              [&](int c) { read(Buffer::router_partials, ring_tile(t.tile), c, t.tile); });
      valid_rows(t.tile, [&](int32_t row) {
        const int32_t slot = p_.s.row_slot[row];
        write(Buffer::returned_grads, g().owner_index(slot), 0, slot, g().slot_rank(slot));
      });
      break;
    case TaskKind::d_input:
      inter_blocks(inter, [&](int c) {
        read(Buffer::ring_d_gate, ring_tile(t.tile), c, t.tile);
        read(Buffer::ring_d_up, ring_tile(t.tile), c, t.tile);
      });
      push_rows(t);
      break;
    case TaskKind::weight_grad:
      weight_grad(t);
      break;
    case TaskKind::shared_d_hidden:
      if (g().shared_gate) read(Buffer::sigma, t.tile, 0, 0);
      inter_blocks(shared, kTileDHidden, t.column, [&](int c) {
        if (!g().keep_shared) read(Buffer::shared_gate, t.tile, c, 0);
        for (const Buffer b : {Buffer::shared_hidden, Buffer::shared_d_gate, Buffer::shared_d_up}) {
          write(b, t.tile, c, 1);
        }
      });
      break;
    case TaskKind::shared_d_input:
      inter_blocks(shared, [&](int c) {
        read(Buffer::shared_d_gate, t.tile, c, 1);
        read(Buffer::shared_d_up, t.tile, c, 1);
      });
      write(Buffer::shared_rows, t.tile, t.column, 1);
      break;
    case TaskKind::shared_weight_grad: {
      const Buffer b = t.matrix == WeightMatrix::down   ? Buffer::shared_hidden
                       : t.matrix == WeightMatrix::gate ? Buffer::shared_d_gate
                                                        : Buffer::shared_d_up;
      for (int tile = 0; tile < g().own_tiles(); ++tile) {
        inter_blocks(shared, [&](int c) { read(b, tile, c, 1); });
      }
      output(Output::shared_weight_grad, static_cast<int64_t>(t.matrix) * 1024 + t.row_block,
             t.column);
      break;
    }
    case TaskKind::vector_grad:
      for (int tile = 0; tile < g().own_tiles(); ++tile) read(Buffer::sigma, tile, 0, 0);
      output(Output::vector_grad, 0, t.column);
      break;
    case TaskKind::announce_staged:
    case TaskKind::announce_returned:
    case TaskKind::count:
      break;
  }
}

void expect_grads(const Plan& p, const GradTiles& n, int inter, Output o, int64_t base, int call,
                  std::vector<uint64_t>& out) {
  for (int32_t i = 0; i < n.total(); ++i) {
    Task t;
    decode_grad(n, p.g.hidden, inter, i, &t);
    const int64_t row = base + static_cast<int64_t>(t.matrix) * 1024 + t.row_block;
    out.push_back(cell(p.g.rank, kOutputBase + static_cast<int>(o), row * 8 + call, t.column));
  }
}

void expect_outputs(const Plan& p, int call, std::vector<uint64_t>& out) {
  const auto expect = [&](Output o, int64_t i, int64_t j) {
    out.push_back(cell(p.g.rank, kOutputBase + static_cast<int>(o), i * 8 + call, j));
  };
  const bool forward = p.g.direction == Direction::forward;
  for (int token = 0; token < p.g.own_tokens(); ++token) {
    expect(Output::y, token, 0);
    if (!forward) expect(Output::d_topk_weights, token, 0);
  }
  if (forward) return;
  for (int e = 0; e < p.g.experts_local(); ++e) {
    expect_grads(p, routed_grad_tiles(p.g), p.g.intermediate, Output::weight_grad,
                 int64_t{e} * 4096, call, out);
  }
  if (!p.g.has_shared()) return;
  expect_grads(p, shared_grad_tiles(p.g), p.g.shared_intermediate, Output::shared_weight_grad, 0,
               call, out);
  if (!p.g.shared_gate || !p.g.wanted.d_shared_vector) return;
  for (int c = 0; c < p.g.columns_hidden(); ++c) expect(Output::vector_grad, 0, c);
}

void add_queue(const Plan& p, int call, Queue queue, std::vector<Node>& nodes) {
  for (int32_t ticket = 0; ticket < tickets(p, queue); ++ticket) {
    Node node;
    node.call = call;
    node.rank = p.g.rank;
    node.queue = queue;
    node.ticket = ticket;
    node.task = decode(p, queue, ticket);
    for_each_wait(p, node.task, [&](Wait w) { node.waits.push_back(w); });
    for_each_signal(p, node.task, [&](Counter c, int32_t i) { node.signals.push_back({c, i, 1}); });
    const Counter flag = announced_flag(node.task.kind);
    if (flag != Counter::count) node.signals.push_back({flag, p.g.rank, 1});
    Accesses(p, call, node.accesses).of_task(node.task);
    nodes.push_back(std::move(node));
  }
}

// Reads of returned rows are only meant for slots that route somewhere.
void drop_unrouted_reads(const std::vector<std::unique_ptr<HostPlan>>& plans,
                         std::vector<Node>& nodes, size_t first_node) {
  const Geometry& g = plans[0]->plan.g;
  std::vector<char> routed(g.slots(), 0);
  for (const auto& host : plans) {
    for (const int32_t slot : host->schedule.row_slot) {
      if (slot >= 0) routed[slot] = 1;
    }
  }
  for (size_t n = first_node; n < nodes.size(); ++n) {
    if (nodes[n].task.kind != TaskKind::reduce) continue;
    std::erase_if(nodes[n].accesses, [&](const Access& a) {
      const auto memory = static_cast<Buffer>(a.cell >> 52 & 0xff);
      const bool returned = memory == Buffer::returned_rows || memory == Buffer::returned_grads;
      return returned && !a.write && !routed[a.version & 0xffffffff];
    });
  }
}

}  // namespace

Program make_program(const Calls& calls) {
  Program program;
  program.calls = static_cast<int>(calls.size());
  program.ranks = static_cast<int>(calls.at(0).size());
  for (int call = 0; call < program.calls; ++call) {
    const size_t first_node = program.nodes.size();
    for (const auto& host : calls[call]) {
      const Plan& p = host->plan;
      const int64_t version = static_cast<int64_t>(call) << 40;
      Node arrive{.kind = Node::Kind::arrive, .call = call, .rank = p.g.rank};
      arrive.signals.push_back({Counter::arrived, p.g.rank, 1});
      arrive.accesses.push_back(
          {cell(p.g.rank, static_cast<int>(Buffer::ids), 0, 0), version, true});
      Node schedule{.kind = Node::Kind::schedule, .call = call, .rank = p.g.rank};
      for (int r = 0; r < program.ranks; ++r) {
        schedule.waits.push_back({Counter::arrived, r, 1});
        schedule.accesses.push_back({cell(r, static_cast<int>(Buffer::ids), 0, 0), version, false});
      }
      program.nodes.push_back(std::move(arrive));
      program.nodes.push_back(std::move(schedule));
      add_queue(p, call, Queue::communication, program.nodes);
      add_queue(p, call, Queue::compute, program.nodes);
      program.nodes.push_back({.kind = Node::Kind::leave, .call = call, .rank = p.g.rank});
      expect_outputs(p, call, program.outputs);
    }
    drop_unrouted_reads(calls[call], program.nodes, first_node);
  }
  return program;
}

}  // namespace mok::plan
