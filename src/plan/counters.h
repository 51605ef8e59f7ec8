// What each task waits for and what it signals: the only place where targets are stated.
#pragma once

#include "plan/tasks.h"

namespace mok::plan {

// d_hidden, router_grad and d_input tasks of one tile.
MOK_HD inline int32_t backward_tasks_of_tile(const Geometry& g) {
  return g.columns_d_hidden() + (g.wanted.d_topk_weights ? 1 : 0) +
         (g.wanted.d_x ? g.columns_hidden() : 0);
}

// Tasks that use the ring rows of a window: its final count.
MOK_HD inline int32_t window_target(const Plan& p, int window) {
  const Geometry& g = p.g;
  const int per_window = window_minibatches(p);
  const int m0 = window * per_window;
  const int m1 = m0 + per_window < p.s.minibatches ? m0 + per_window : p.s.minibatches;
  const int tiles = minibatch_begin(p, m1) - minibatch_begin(p, m0);
  if (g.direction == Direction::forward) return tiles * (g.columns_inter() + g.columns_hidden());
  const int saved = saved_minibatches(p);
  const int fresh = m0 > saved ? m0 : saved < m1 ? saved : m1;  // first minibatch recomputed
  return tiles * backward_tasks_of_tile(g) +
         (minibatch_begin(p, m1) - minibatch_begin(p, fresh)) * g.columns_inter() +
         (p.s.segment_begin[m1] - p.s.segment_begin[m0]) * routed_grad_tiles(g).total();
}

MOK_HD inline int32_t pushed_target(const Plan& p) {
  const Geometry& g = p.g;
  if (g.direction == Direction::forward) return p.s.tiles * g.columns_hidden();
  return p.s.tiles * backward_tasks_of_tile(g);
}

// Calls f(Wait) for everything that must hold before the task may begin. That all ranks have
// arrived is known before any task: the schedule needs their ids.
template <class F>
MOK_HD void for_each_wait(const Plan& p, const Task& t, F&& f) {
  const Geometry& g = p.g;
  const bool forward = g.direction == Direction::forward;
  const auto flags_of_all = [&](Counter flag, bool with_own) {
    for (int r = 0; r < g.ranks; ++r) {
      if (with_own || r != g.rank) f(Wait{flag, r, 1});
    }
  };
  switch (t.kind) {
    case TaskKind::stage:
      break;
    case TaskKind::announce_staged:
      f(Wait{Counter::staged, 0, phase_size(p, TaskKind::stage, 0)});
      break;
    case TaskKind::fetch: {
      if (g.ranks > 1) flags_of_all(Counter::staged_flag, false);
      const int window = t.minibatch / window_minibatches(p);
      if (window >= 2) f(Wait{Counter::window_done, window - 2, window_target(p, window - 2)});
      break;
    }
    case TaskKind::sigma:
      if (!forward && !g.keep_shared) f(Wait{Counter::shared_rows, t.tile, g.columns_hidden()});
      break;
    case TaskKind::shared_gate_up:
      break;
    case TaskKind::shared_down:
      f(Wait{Counter::shared_hidden, t.tile, g.columns_shared()});
      break;
    case TaskKind::gate_up:
      f(Wait{Counter::fetched, t.tile, p.s.tile[t.tile].rows});
      break;
    case TaskKind::down:
      f(Wait{Counter::hidden, t.tile, g.columns_inter()});
      break;
    case TaskKind::announce_returned:
      f(Wait{Counter::pushed, 0, pushed_target(p)});
      break;
    case TaskKind::reduce: {
      flags_of_all(Counter::returned_flag, true);
      if (!g.has_shared()) break;
      for (int own = t.begin / kTileRows; own * kTileRows < t.end; ++own) {
        if (g.shared_gate) f(Wait{Counter::sigma, own, 1});
        if (forward) f(Wait{Counter::shared_rows, own, g.columns_hidden()});
        if (!forward && g.wanted.d_x) f(Wait{Counter::shared_d_rows, own, g.columns_hidden()});
      }
      break;
    }
    case TaskKind::d_hidden:
      if (is_saved(p, t.tile)) {
        f(Wait{Counter::fetched, t.tile, p.s.tile[t.tile].rows});
      } else {
        f(Wait{Counter::hidden, t.tile, g.columns_inter()});
      }
      break;
    case TaskKind::router_grad:
    case TaskKind::d_input:
      f(Wait{Counter::d_hidden, t.tile, g.columns_d_hidden()});
      break;
    case TaskKind::weight_grad: {
      const Segment& segment = p.s.segment[t.tile];
      f(Wait{Counter::segment_ready, t.tile, segment.tiles * g.columns_d_hidden()});
      const int32_t all = routed_grad_tiles(g).total();
      if (segment.previous >= 0) f(Wait{Counter::segment_done, segment.previous, all});
      if (segment.carry_reader >= 0) f(Wait{Counter::segment_done, segment.carry_reader, all});
      break;
    }
    case TaskKind::shared_d_hidden:
      if (g.shared_gate) f(Wait{Counter::sigma, t.tile, 1});
      if (!g.keep_shared) f(Wait{Counter::shared_hidden, t.tile, g.columns_shared()});
      break;
    case TaskKind::shared_d_input:
      f(Wait{Counter::shared_d_hidden, t.tile, g.columns_shared_d_hidden()});
      break;
    case TaskKind::shared_weight_grad:
      f(Wait{Counter::shared_ready, 0, g.own_tiles() * g.columns_shared_d_hidden()});
      break;
    case TaskKind::vector_grad:
      f(Wait{Counter::sigma_all, 0, g.own_tiles()});
      break;
    case TaskKind::count:
      break;
  }
}

// Calls f(counter, index) for each increment by one that the finished task makes. The announce
// tasks raise flags instead: see `announced_flag`.
template <class F>
MOK_HD void for_each_signal(const Plan& p, const Task& t, F&& f) {
  const Geometry& g = p.g;
  const auto window_done = [&](int window) {
    if (p.s.windows > 2) f(Counter::window_done, window);  // else nobody waits for it
  };
  switch (t.kind) {
    case TaskKind::stage:
      f(Counter::staged, 0);
      break;
    case TaskKind::fetch:
      for (int32_t i = t.begin; i < t.end; ++i) {
        for_each_stored_row(g, p.s, p.s.fetch_row[i],
                            [&](int32_t row) { f(Counter::fetched, row / kTileRows); });
      }
      break;
    case TaskKind::sigma:
      f(Counter::sigma, t.tile);
      f(Counter::sigma_all, 0);
      break;
    case TaskKind::shared_gate_up:
      f(Counter::shared_hidden, t.tile);
      break;
    case TaskKind::shared_down:
      f(Counter::shared_rows, t.tile);
      break;
    case TaskKind::gate_up:
      f(Counter::hidden, t.tile);
      window_done(window_of_tile(p, t.tile));
      break;
    case TaskKind::down:
    case TaskKind::router_grad:
    case TaskKind::d_input:
      f(Counter::pushed, 0);
      window_done(window_of_tile(p, t.tile));
      break;
    case TaskKind::d_hidden:
      f(Counter::d_hidden, t.tile);
      f(Counter::segment_ready, p.s.segment_of_tile[t.tile]);
      f(Counter::pushed, 0);  // with it the tile's rows are known to be pulled
      window_done(window_of_tile(p, t.tile));
      break;
    case TaskKind::weight_grad:
      if (p.s.windows > 1) f(Counter::segment_done, t.tile);  // else nobody carries on
      window_done(p.s.segment[t.tile].window);
      break;
    case TaskKind::shared_d_hidden:
      f(Counter::shared_d_hidden, t.tile);
      f(Counter::shared_ready, 0);
      break;
    case TaskKind::shared_d_input:
      f(Counter::shared_d_rows, t.tile);
      break;
    case TaskKind::announce_staged:
    case TaskKind::announce_returned:
    case TaskKind::reduce:
    case TaskKind::shared_weight_grad:
    case TaskKind::vector_grad:
    case TaskKind::count:
      break;
  }
}

// The flag that an announce task raises on every rank, or Counter::count.
MOK_HD inline Counter announced_flag(TaskKind kind) {
  return kind == TaskKind::announce_staged     ? Counter::staged_flag
         : kind == TaskKind::announce_returned ? Counter::returned_flag
                                               : Counter::count;
}

// Number of entries of a counter over every routing.
MOK_HD inline int32_t counter_size(const Geometry& g, Counter c) {
  const int own = ceil_div(g.max_tokens, kTileRows);
  switch (c) {
    case Counter::fetched:
    case Counter::hidden:
    case Counter::d_hidden:
      return g.most_tiles();
    case Counter::window_done:
      return g.most_windows();
    case Counter::sigma:
    case Counter::shared_hidden:
    case Counter::shared_rows:
    case Counter::shared_d_hidden:
    case Counter::shared_d_rows:
      return own > 0 ? own : 1;
    case Counter::segment_ready:
    case Counter::segment_done:
      return g.most_segments();
    case Counter::arrived:
    case Counter::staged_flag:
    case Counter::returned_flag:
      return g.ranks;
    case Counter::staged:
    case Counter::pushed:
    case Counter::sigma_all:
    case Counter::shared_ready:
      return 1;
    case Counter::count:
      break;
  }
  return 0;
}

// First entry of a counter in the array of local counters (flags: in the array of flags).
MOK_HD inline int32_t counter_offset(const Geometry& g, Counter c) {
  int32_t offset = 0;
  for (int i = is_flag(c) ? static_cast<int>(Counter::first_flag) : 0; i < static_cast<int>(c);
       ++i) {
    offset += counter_size(g, static_cast<Counter>(i));
  }
  return offset;
}
MOK_HD inline int32_t local_counters(const Geometry& g) {
  int32_t n = 0;
  for (int i = 0; i < static_cast<int>(Counter::first_flag); ++i) {
    n += counter_size(g, static_cast<Counter>(i));
  }
  return n;
}

}  // namespace mok::plan
