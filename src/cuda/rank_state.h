// What the megakernel knows of one rank: the caller's tensors, the rank's memory and the tables
// that the schedule step fills in. Plain data, passed by value at launch.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "mok/layer.h"
#include "plan/counters.h"
#include "plan/layout.h"
#include "plan/tasks.h"

namespace mok::cuda {

inline constexpr int kScheduleChunks = 64;       // slots are counted and placed in this many tasks
inline constexpr int kPublishTasks = 64;         // ids are published in this many tasks
inline constexpr int kFetchListTasks = 32;       // each makes the lists of every 32nd minibatch
inline constexpr int kMostMinibatchTiles = 256;  // a fetch list is sorted in shared memory
inline constexpr int kFetchTaskRows = 12;        // what the kernel has room for,
inline constexpr int kFetchTaskCopies = 256;     // counting every row's copies

// What a wait was for, when its deadline passed; in host memory, written once per call.
struct ErrorRecord {
  enum Kind : int32_t {
    none,
    arrival,       // a flag of a peer; entry: in the array of flags
    flag,          // the same, inside the call
    progress,      // a local counter; entry: in the array of counters
    schedule,      // a step of the schedule; entry: word of Tickets
    disagreement,  // entry: the peer
    bad_id,        // entry: the slot; seen: the id
    aborted,       // entry: the rank that ended the call
  };
  int32_t kind;
  int32_t rank;  // that waited
  int32_t task;  // plan::TaskKind, or -1: in the schedule
  int32_t entry;
  int64_t seen, awaited;
};

// At the start of Buffer::control, in symmetric memory; written by peers.
struct Control {
  struct Header {
    uint64_t tag;     // direction, shape, precision, wanted gradients: equal on all ranks
    int64_t wide_id;  // the source's first id that is published as INT32_MIN
    int32_t tokens;   // T of the source rank
    int32_t unused;
  } from[kMaxRanks];
  uint32_t abort;  // not 0: leave; 1 + the rank that says so
};

// Local words that count blocks and tickets; all zero between calls.
struct Tickets {
  uint32_t schedule, compute, communication;
  uint32_t published, counted, laid_out, placed, marked, listed, planned;  // schedule tasks done
  uint32_t left;                                                           // blocks that have left
  uint32_t recorded;  // the error record is taken
  uint32_t bad_id;    // ~slot of the first id outside [-1, E); 0 = none
  uint32_t wide_id;   // ~index of the first own id that is published as INT32_MIN; 0 = none
};

// When the parts of the last call were over, in nanoseconds of the device's clock: the latest
// block counts.
struct Stamps {
  enum Point : int32_t { begin, planned, returned, end, count };
  uint64_t at[count];
};

// Tables of the schedule, in one local block.
struct Tables {
  plan::Plan* plan;
  plan::Phase *compute, *communication;  // [most_phases]
  int32_t* chunk_count;  // [kScheduleChunks, E_local]; from layout on: rows in earlier chunks
  int32_t *expert_begin, *expert_rows, *row_slot, *slot_row, *fetch_row, *fetch_count;
  plan::Tile* tile;
  plan::Segment* segment;                    // [most_segments]; backward only, as the next two
  int32_t *segment_of_tile, *segment_begin;  // [most_tiles], [most_minibatches + 1]
  float* row_weight;                         // [most rows] router weight of a row; backward only
  int8_t* row_source;  // [most rows] the rank from which a token is fetched for this row, or -1
  uint64_t* row_destination;  // [most rows] where a row of y's or d_x's sum belongs, 0 on padding
  uint64_t* shared_destination;  // [T_max] rows of Buffer::shared_rows
};

struct RankState {
  plan::Geometry g;  // without the tokens of other ranks, which the device learns
  int64_t
      offset[plan::kBuffers];  // plan::Layout's; its bytes would not fit eight ranks' parameters
  int32_t counter_first[plan::kCounters];  // plan::counter_offset
  Tables tables;
  Tickets* tickets;
  int64_t* call;                  // number of the last call that began here, in device memory
  uint8_t* symmetric[kMaxRanks];  // every rank's block
  uint8_t* local;
  ErrorRecord* record;
  Stamps* stamps;
  uint64_t tag;
  uint64_t arrival_ns, progress_ns;  // 0 = no deadline
  int32_t tail_rows;    // an expert's last rows, if they are no more, join the tile before
  int32_t comm_blocks;  // blocks of this rank that communicate, at least 1

  const __nv_bfloat16* x;
  int64_t x_stride;
  const void* ids;
  int32_t ids_are_64;
  const float* weights;
  const __nv_bfloat16* shared_vector;
  __nv_bfloat16* y;
  int64_t y_stride;

  // Backward only. Null: not wanted, not kept.
  const __nv_bfloat16* d_y;
  int64_t d_y_stride;
  const __nv_bfloat16* saved_shared_out;  // [T, H] r_s, with a shared gate
  __nv_bfloat16* d_x;
  int64_t d_x_stride;
  float* d_topk_weights;  // [T, K]
  void* d_shared_vector;  // [H], bf16 or fp32 by mode
  GradMode d_shared_vector_mode;

  template <class T>
  MOK_HD T* at(plan::Buffer b) const {
    return reinterpret_cast<T*>(local + offset[static_cast<int>(b)]);
  }
  template <class T>
  MOK_HD T* at(plan::Buffer b, int rank) const {
    return reinterpret_cast<T*>(symmetric[rank] + offset[static_cast<int>(b)]);
  }
  MOK_HD Control* control(int rank) const { return at<Control>(plan::Buffer::control, rank); }
  MOK_HD int64_t* flag(plan::Counter c, int rank, int source) const {
    return at<int64_t>(plan::Buffer::flags, rank) + counter_first[static_cast<int>(c)] + source;
  }
  MOK_HD uint32_t* counter(plan::Counter c, int index) const {
    return at<uint32_t>(plan::Buffer::counters) + counter_first[static_cast<int>(c)] + index;
  }
};

}  // namespace mok::cuda
