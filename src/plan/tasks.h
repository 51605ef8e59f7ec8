// Tasks, the order in which they are handed out, what each waits for and what it signals.
//
// Each rank has two queues, compute and communication. A queue is a list of phases; a phase holds
// tasks of one kind. A ticket number becomes a task by a binary search over phases and a division.
//
//   forward   communication  stage, announce_staged, fetch(0), fetch(1), ...
//             compute        sigma, shared_gate_up, shared_down,
//                            gate_up(0), gate_up(1), down(0), gate_up(2), down(1), ...,
//                            announce_returned, reduce
//   backward  compute        [shared_gate_up, shared_down], sigma, shared_d_hidden,
//                            shared_d_input, shared_weight_grad, vector_grad,
//                            [gate_up(0)], d_hidden(0), ..., d_hidden(m), router_grad(m-1),
//                            d_input(m-1), weight_grad(m-1), ..., announce_returned,
//                            weight_grad(last), reduce
//
// (numbers are minibatches; brackets: only what forward did not keep). Every wait points backwards
// in one total order over all ranks' tasks that extends every queue; `validate` proves it.
#pragma once

#include <cstdint>

#include "plan/geometry.h"
#include "plan/schedule.h"

namespace mok::plan {

enum class Queue : int32_t { compute, communication };

enum class TaskKind : int32_t {
  // communication
  stage,            // own x (and d_y) rows [begin, end) -> symmetric staging
  announce_staged,  // tell every rank that this rank's staging is complete
  fetch,            // fetch list entries [begin, end): pull a token, store it to all its rows
  // compute, both directions
  sigma,              // own tile: sigmoid(x . gate); backward: also d_sigma * sigma'
  shared_gate_up,     // own tile, columns of I_s
  shared_down,        // own tile, columns of H
  gate_up,            // tile, columns of I (backward: recomputes what was not kept)
  down,               // tile, columns of H; pushes rows to their owners
  announce_returned,  // tell every rank that this rank has pulled and pushed everything
  reduce,             // own tokens [begin, end): the K rows of each, in k order
  // compute, backward
  d_hidden,            // tile, columns of I
  router_grad,         // tile: sums the router-weight partials, pushes them to their owners
  d_input,             // tile, columns of H; pushes rows to their owners
  weight_grad,         // segment, one tile of d_w_gate, d_w_up or d_w_down
  shared_d_hidden,     // own tile, columns of I_s
  shared_d_input,      // own tile, columns of H
  shared_weight_grad,  // one tile of a shared expert's weight gradient
  vector_grad,         // columns of H of the shared gate vector's gradient
  count
};
inline constexpr int kTaskKinds = static_cast<int>(TaskKind::count);
const char* to_string(TaskKind kind);

enum class WeightMatrix : int32_t { gate, up, down };

struct Task {
  TaskKind kind = TaskKind::count;
  int32_t minibatch = 0;
  int32_t tile = 0;       // tile of rows, own tile (shared expert), or segment (weight_grad)
  int32_t column = 0;     // column tile
  int32_t row_block = 0;  // weight gradients: row tile of the matrix
  WeightMatrix matrix = WeightMatrix::gate;  // weight gradients
  int32_t begin = 0, end = 0;                // stage, fetch, reduce
};
static_assert(sizeof(Task) == 32);

// Counters are zero at the start of a call and only count up; every wait on one is for its final
// value. Those of `first_flag` and later live in every rank's symmetric memory, one per source
// rank, and hold the number of the last call that reached the point.
enum class Counter : int32_t {
  staged,           // stage tasks done
  fetched,          // [tile] rows stored
  hidden,           // [tile] gate_up tasks done
  pushed,           // tasks done that pull from or push to peers
  window_done,      // [window] tasks done that use the window's ring rows
  sigma,            // [own tile]
  sigma_all,        // own tiles done
  shared_hidden,    // [own tile] shared_gate_up tasks done
  shared_rows,      // [own tile] shared_down tasks done
  d_hidden,         // [tile] d_hidden tasks done
  segment_ready,    // [segment] d_hidden tasks done
  segment_done,     // [segment] weight_grad tasks done
  shared_d_hidden,  // [own tile]
  shared_d_rows,    // [own tile] shared_d_input tasks done
  shared_ready,     // shared_d_hidden tasks done, all tiles
  first_flag,
  arrived = first_flag,  // [source rank] has begun the call: ids and weights are published
  staged_flag,           // [source rank] announce_staged
  returned_flag,         // [source rank] announce_returned
  count
};
inline constexpr int kCounters = static_cast<int>(Counter::count);
MOK_HD constexpr bool is_flag(Counter c) { return c >= Counter::first_flag; }
const char* to_string(Counter counter);

struct Wait {
  Counter counter;
  int32_t index;
  int32_t target;  // flags: 1, meaning the number of this call
};

struct Phase {
  int32_t first_ticket = 0;
  TaskKind kind = TaskKind::count;
  int32_t minibatch = 0;
};

// One rank's plan of one call: a POD view, the same on host and device.
struct Plan {
  Geometry g;
  Schedule s;
  const Phase* compute = nullptr;        // [compute_phases + 1], the last one is the end
  const Phase* communication = nullptr;  // [communication_phases + 1]
  int32_t compute_phases = 0;
  int32_t communication_phases = 0;
};

// ---- sizes ----------------------------------------------------------------------------------

MOK_HD inline int minibatch_begin(const Plan& p, int m) {  // first tile
  const int t = m * p.g.minibatch_tiles;
  return t < p.s.tiles ? t : p.s.tiles;
}
MOK_HD inline int minibatch_tiles(const Plan& p, int m) {
  return minibatch_begin(p, m + 1) - minibatch_begin(p, m);
}
MOK_HD inline int window_minibatches(const Plan& p) {
  return p.g.window_tiles(p.s.tiles) / p.g.minibatch_tiles;
}
MOK_HD inline int window_of_tile(const Plan& p, int tile) {
  return tile / p.g.window_tiles(p.s.tiles);
}
// Row of the ring in which a row stands.
MOK_HD inline int32_t ring_row(const Plan& p, int32_t row) {
  return row % (p.g.ring_tiles * kTileRows);
}
// Whole minibatches whose gate and up rows fit `saved_rows`.
MOK_HD inline int saved_minibatches(const Plan& p) {
  if (p.g.saved_rows >= int64_t{p.s.tiles} * kTileRows) return p.s.minibatches;
  return static_cast<int>(p.g.saved_rows / (int64_t{p.g.minibatch_tiles} * kTileRows));
}
MOK_HD inline bool is_saved(const Plan& p, int tile) {
  return tile / p.g.minibatch_tiles < saved_minibatches(p);
}

// Whether rows of x are fetched. A rank's own answer: a peer with other rows may need them, so x is
// staged always.
MOK_HD inline bool needs_x(const Plan& p) {
  return p.g.direction == Direction::forward || p.g.wanted.d_gate || p.g.wanted.d_up ||
         saved_minibatches(p) < p.s.minibatches;
}

struct GradTiles {  // tasks of one segment (or of the shared expert), by matrix
  int32_t gate = 0, up = 0, down = 0;
  MOK_HD int total() const { return gate + up + down; }
};
MOK_HD inline GradTiles grad_tiles(int hidden, int inter, bool gate, bool up, bool down) {
  const int inward = ceil_div(inter, kGradRows) * ceil_div(hidden, kGradCols);
  const int outward = ceil_div(hidden, kGradRows) * ceil_div(inter, kGradCols);
  return {gate ? inward : 0, up ? inward : 0, down ? outward : 0};
}
MOK_HD inline GradTiles routed_grad_tiles(const Geometry& g) {
  return grad_tiles(g.hidden, g.intermediate, g.wanted.d_gate, g.wanted.d_up, g.wanted.d_down);
}
MOK_HD inline GradTiles shared_grad_tiles(const Geometry& g) {
  return grad_tiles(g.hidden, g.shared_intermediate, g.wanted.d_shared_gate, g.wanted.d_shared_up,
                    g.wanted.d_shared_down);
}

MOK_HD inline int32_t phase_size(const Plan& p, TaskKind kind, int m) {
  const Geometry& g = p.g;
  switch (kind) {
    case TaskKind::stage:
      return ceil_div(g.own_tokens(), g.stage_rows);
    case TaskKind::fetch:
      return ceil_div(p.s.fetch_count[m], g.fetch_rows);
    case TaskKind::sigma:
      return g.own_tiles();
    case TaskKind::shared_gate_up:
      return g.own_tiles() * g.columns_shared();
    case TaskKind::shared_d_hidden:
      return g.own_tiles() * g.columns_shared_d_hidden();
    case TaskKind::shared_down:
    case TaskKind::shared_d_input:
      return g.own_tiles() * g.columns_hidden();
    case TaskKind::gate_up:
      return minibatch_tiles(p, m) * g.columns_inter();
    case TaskKind::d_hidden:
      return minibatch_tiles(p, m) * g.columns_d_hidden();
    case TaskKind::down:
    case TaskKind::d_input:
      return minibatch_tiles(p, m) * g.columns_hidden();
    case TaskKind::router_grad:
      return minibatch_tiles(p, m);
    case TaskKind::weight_grad:
      return (p.s.segment_begin[m + 1] - p.s.segment_begin[m]) * routed_grad_tiles(g).total();
    case TaskKind::shared_weight_grad:
      return shared_grad_tiles(g).total();
    case TaskKind::vector_grad:
      return g.columns_hidden();
    case TaskKind::announce_staged:
    case TaskKind::announce_returned:
      return 1;
    // At least one: a rank without tokens also stays until every peer has returned.
    case TaskKind::reduce:
      return g.own_tokens() > 0 ? ceil_div(g.own_tokens(), g.reduce_tokens) : 1;
    case TaskKind::count:
      break;
  }
  return 0;
}

// ---- the order ------------------------------------------------------------------------------

// Calls emit(kind, minibatch) for each phase of the queue, in order.
template <class Emit>
MOK_HD void for_each_phase(const Plan& p, Queue queue, Emit&& emit) {
  const Geometry& g = p.g;
  const int last = p.s.minibatches - 1;
  if (queue == Queue::communication) {
    if (g.ranks > 1) {
      emit(TaskKind::stage, 0);
      emit(TaskKind::announce_staged, 0);
    }
    for (int m = 0; m <= last; ++m) emit(TaskKind::fetch, m);
    return;
  }
  const bool forward = g.direction == Direction::forward;
  const bool shared = g.has_shared();
  if (forward) {
    if (shared && g.shared_gate) emit(TaskKind::sigma, 0);
    if (shared) emit(TaskKind::shared_gate_up, 0);
    if (shared) emit(TaskKind::shared_down, 0);
    for (int m = 0; m <= last; ++m) {
      emit(TaskKind::gate_up, m);
      if (m > 0) emit(TaskKind::down, m - 1);
    }
    emit(TaskKind::down, last);
    emit(TaskKind::announce_returned, 0);
    emit(TaskKind::reduce, 0);
    return;
  }
  if (shared) {
    if (!g.keep_shared) emit(TaskKind::shared_gate_up, 0);
    if (!g.keep_shared && g.shared_gate) emit(TaskKind::shared_down, 0);
    if (g.shared_gate) emit(TaskKind::sigma, 0);
    emit(TaskKind::shared_d_hidden, 0);
    if (g.wanted.d_x) emit(TaskKind::shared_d_input, 0);
    emit(TaskKind::shared_weight_grad, 0);
    if (g.shared_gate && g.wanted.d_shared_vector) emit(TaskKind::vector_grad, 0);
  }
  const int saved = saved_minibatches(p);
  // gate_up runs a minibatch ahead where the window holds two: no block waits for a neighbour.
  const int ahead = saved <= last && window_minibatches(p) > 1 ? 1 : 0;
  for (int step = 0; step <= last + ahead + 1; ++step) {
    const int recompute = step, hidden = step - ahead, input = step - ahead - 1;
    if (recompute <= last && recompute >= saved) emit(TaskKind::gate_up, recompute);
    if (hidden >= 0 && hidden <= last) emit(TaskKind::d_hidden, hidden);
    if (input < 0 || input > last) continue;
    if (g.wanted.d_topk_weights) emit(TaskKind::router_grad, input);
    if (g.wanted.d_x) emit(TaskKind::d_input, input);
    // The last weight gradients fill the wait for the peers' rows.
    if (input == last) emit(TaskKind::announce_returned, 0);
    emit(TaskKind::weight_grad, input);
  }
  emit(TaskKind::reduce, 0);
}

// Bound of the phases of a queue, the end mark included.
MOK_HD inline int most_phases(const Geometry& g) { return 16 + 5 * g.most_minibatches(); }

// Writes the queue's phases and the end mark; returns their number without the end mark.
MOK_HD inline int32_t build_phases(const Plan& p, Queue queue, Phase* out) {
  int32_t phases = 0;
  int32_t ticket = 0;
  for_each_phase(p, queue, [&](TaskKind kind, int m) {
    const int32_t size = phase_size(p, kind, m);
    if (size == 0) return;
    out[phases++] = {ticket, kind, m};
    ticket += size;
  });
  out[phases] = {ticket, TaskKind::count, 0};
  return phases;
}

MOK_HD inline int32_t tickets(const Plan& p, Queue queue) {
  return queue == Queue::compute ? p.compute[p.compute_phases].first_ticket
                                 : p.communication[p.communication_phases].first_ticket;
}

// ---- ticket -> task -------------------------------------------------------------------------

MOK_HD inline void decode_grad(const GradTiles& n, int hidden, int inter, int32_t i, Task* t) {
  t->matrix = i < n.gate          ? WeightMatrix::gate
              : i < n.gate + n.up ? WeightMatrix::up
                                  : WeightMatrix::down;
  if (t->matrix == WeightMatrix::up) i -= n.gate;
  if (t->matrix == WeightMatrix::down) i -= n.gate + n.up;
  const int rows = t->matrix == WeightMatrix::down ? hidden : inter;
  const int blocks = ceil_div(rows, kGradRows);
  t->column = i / blocks;
  t->row_block = i % blocks;
}

MOK_HD inline Task decode_in_phase(const Plan& p, const Phase& phase, int32_t i) {
  const Geometry& g = p.g;
  Task t;
  t.kind = phase.kind;
  t.minibatch = phase.minibatch;
  switch (phase.kind) {
    case TaskKind::stage:
      t.begin = i * g.stage_rows;
      t.end = t.begin + g.stage_rows < g.own_tokens() ? t.begin + g.stage_rows : g.own_tokens();
      break;
    case TaskKind::fetch: {
      const int32_t first = minibatch_begin(p, phase.minibatch) * kTileRows;
      const int32_t end = first + p.s.fetch_count[phase.minibatch];
      t.begin = first + i * g.fetch_rows;
      t.end = t.begin + g.fetch_rows < end ? t.begin + g.fetch_rows : end;
      break;
    }
    case TaskKind::reduce:
      t.begin = i * g.reduce_tokens;
      t.end =
          t.begin + g.reduce_tokens < g.own_tokens() ? t.begin + g.reduce_tokens : g.own_tokens();
      break;
    case TaskKind::gate_up:
    case TaskKind::d_hidden:
    case TaskKind::down:
    case TaskKind::d_input: {
      // Inside a slice (one expert) columns are outer and tiles inner: a weight tile is used by
      // all tiles of rows while it is in L2.
      const int columns = phase.kind == TaskKind::gate_up    ? g.columns_inter()
                          : phase.kind == TaskKind::d_hidden ? g.columns_d_hidden()
                                                             : g.columns_hidden();
      const int first = minibatch_begin(p, phase.minibatch);
      const Tile& tile = p.s.tile[first + i / columns];
      const int32_t in_slice = i - (tile.slice_begin - first) * columns;
      t.column = in_slice / tile.slice_tiles;
      t.tile = tile.slice_begin + in_slice % tile.slice_tiles;
      break;
    }
    case TaskKind::router_grad:
      t.tile = minibatch_begin(p, phase.minibatch) + i;
      break;
    case TaskKind::weight_grad: {
      const GradTiles n = routed_grad_tiles(g);
      t.tile = p.s.segment_begin[phase.minibatch] + i / n.total();
      decode_grad(n, g.hidden, g.intermediate, i % n.total(), &t);
      break;
    }
    case TaskKind::shared_weight_grad:
      decode_grad(shared_grad_tiles(g), g.hidden, g.shared_intermediate, i, &t);
      break;
    case TaskKind::shared_gate_up:
    case TaskKind::shared_d_hidden:
    case TaskKind::shared_down:
    case TaskKind::shared_d_input:
      t.column = i / g.own_tiles();
      t.tile = i % g.own_tiles();
      break;
    case TaskKind::sigma:
      t.tile = i;
      break;
    case TaskKind::vector_grad:
      t.column = i;
      break;
    case TaskKind::announce_staged:
    case TaskKind::announce_returned:
    case TaskKind::count:
      break;
  }
  return t;
}

// `ticket` in [0, tickets(p, queue)).
MOK_HD inline Task decode(const Plan& p, Queue queue, int32_t ticket) {
  const Phase* phase = queue == Queue::compute ? p.compute : p.communication;
  int low = 0;
  int high = queue == Queue::compute ? p.compute_phases : p.communication_phases;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (phase[middle].first_ticket <= ticket) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return decode_in_phase(p, phase[low], ticket - phase[low].first_ticket);
}

}  // namespace mok::plan
