// Attention of a flat batch over the paged pool: decode rows and rows of prompt chunks in one call.
//
// Work is cut into jobs of (sequence, KV head, some of its rows). A job walks the positions in steps of kStep that begin
// at multiples of kStep, whatever rows it has, with a running maximum and sum (online softmax). What a row adds, and in
// which order, depends on its own position only; positions that it must not see add exactly nothing.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"

namespace TANDEM_ISA {

using namespace tandem;

constexpr int kStep = 64;       // positions; a multiple of every block size
constexpr int kQueries = 32;    // query rows times heads of a group that a job serves at once (a larger group: one row)

struct Attention {
  const float* query;
  int64_t query_stride;
  const Pool& pool;
  int layer;
  const Batch& batch;
  const AttentionOptions& options;
  float* out;
  int group;             // query heads that share a KV head
  int max_queries;       // of a job
  int rows_per_job, heads_per_job;
  const int32_t* first_jobs;  // [num_sequences + 1]
  char* memory;          // of all threads
  int64_t thread_bytes;
};

// What one thread works in.
struct Scratch {
  float* queries;  // [max_queries][padded head_dim], scaled
  float* outputs;  // the same
  float* keys;     // [kStep][padded head_dim], where the pool's numbers are not float32
  float* values;
  float* scores;                   // [max_queries][kStep]
  float *largest, *total, *kept;   // [max_queries]
};

// head_dim as the kernels are made for it: the least of these that holds it.
TANDEM_INLINE int padded_dim(int head_dim) {
  constexpr int kSizes[] = {16, 32, 64, 80, 96, 128, 192, 256};
  for (const int size : kSizes) {
    if (head_dim <= size) return size;
  }
  return 0;
}

TANDEM_INLINE int64_t scratch_floats(int head_dim, int max_queries) {
  return (int64_t)(2 * max_queries + 2 * kStep) * padded_dim(head_dim) + max_queries * (kStep + 3);
}
TANDEM_INLINE Scratch scratch_at(char* memory, int head_dim, int max_queries) {
  const int64_t of_queries = (int64_t)max_queries * padded_dim(head_dim), of_step = (int64_t)kStep * padded_dim(head_dim);
  float* p = (float*)memory;
  Scratch s;
  s.queries = p, p += of_queries;
  s.outputs = p, p += of_queries;
  s.keys = p, p += of_step;
  s.values = p, p += of_step;
  s.scores = p, p += max_queries * kStep;
  s.largest = p, p += max_queries;
  s.total = p, p += max_queries;
  s.kept = p;
  return s;
}

// K or V of one step as float32, kLanes positions behind each other: in the pool itself where that is so, else in a copy.
struct Groups {
  const float* at[kStep / kLanes];
};

template <typename T, int kVectors>
TANDEM_INLINE void copy_rows(const T* from, int head_dim, int num_rows, float* to) {
  constexpr int kPadded = kVectors * kLanes;
  for (int t = 0; t < num_rows; ++t, from += head_dim, to += kPadded) {
    if (head_dim == kPadded) {
#pragma GCC unroll 8
      for (int i = 0; i < kPadded; i += kLanes) store(to + i, load_floats(from + i));
    } else {
      T padded[kPadded] = {};
      memcpy(padded, from, head_dim * sizeof(T));
      for (int i = 0; i < kPadded; i += kLanes) store(to + i, load_floats(padded + i));
    }
  }
}

template <typename T, int kVectors>
TANDEM_INLINE Groups find_groups(const Attention& a, const int32_t* blocks, int first, int count, int which, int head,
                                 float* copies) {
  constexpr int kPadded = kVectors * kLanes;
  const int block_size = a.pool.block_size, head_dim = a.pool.head_dim;
  const bool can_stay = __is_same(T, float) && head_dim == kPadded && kLanes <= block_size;
  Groups groups;
  const int32_t* block = blocks + first / block_size;  // a step begins with a block
  for (int t = 0; t < count; t += block_size, ++block) {
    const T* from = (const T*)a.pool.data + slot_at(a.pool, *block, a.layer, which, head, 0);
    const int num_rows = smaller(block_size, count - t), num_whole = can_stay ? num_rows / kLanes * kLanes : 0;
    for (int i = 0; i < num_whole; i += kLanes) groups.at[(t + i) / kLanes] = (const float*)from + i * kPadded;
    // No slot past the end of a sequence is read, so the rows of its last group stand in a copy.
    for (int i = num_whole; i < num_rows; i += kLanes) groups.at[(t + i) / kLanes] = copies + (t + i) / kLanes * kLanes * kPadded;
    copy_rows<T, kVectors>(from + num_whole * head_dim, head_dim, num_rows - num_whole, copies + (t + num_whole) * kPadded);
  }
  return groups;
}

// Brings the next step's K and V near while this one is computed. Blocks lie anywhere, and memory answers a core that reads
// one run of 4 KiB after the other at 10 GB/s where it gives one that reads eight at once 24 (measured on Zen 4): so the
// lines of all its runs are asked for in turn.
struct Ahead {
  const char* runs[4 * kStep / 8];
  int num_runs = 0, run_bytes = 0, next_byte = 0;

  template <typename T>
  TANDEM_INLINE void begin(const Attention& a, const int32_t* blocks, int first, int count, int head) {
    num_runs = 0, next_byte = 0;
    run_bytes = smaller(count, a.pool.block_size) * a.pool.head_dim * (int)sizeof(T);
    for (int t = 0; t < count; t += a.pool.block_size) {
      const int32_t block = blocks[(first + t) / a.pool.block_size];
      for (int which = 0; which < 2; ++which) {
        runs[num_runs++] = (const char*)((const T*)a.pool.data + slot_at(a.pool, block, a.layer, which, head, 0));
      }
    }
  }
  // A few lines of each: more would hold up what is computed beside it, and hardware that sees a run goes on by itself.
  TANDEM_INLINE void some() {
    constexpr int kAtOnce = 2 * 64;
    for (const int end = smaller(run_bytes, next_byte + kAtOnce); next_byte < end; next_byte += 64) {
      for (int i = 0; i < num_runs; ++i) prefetch(runs[i] + next_byte);
    }
  }
};

// scores[q][t] of all queries with the positions of a step; sums over head_dim lane by lane, then over lanes.
template <int kVectors>
TANDEM_INLINE void score_step(const float* queries, float* scores, const Groups& keys, int num_queries, int count,
                              Ahead& ahead) {
  constexpr int kPadded = kVectors * kLanes;
  for (int first = 0; first < count; first += kLanes) {
    const float* key = keys.at[first / kLanes];
    for (int q = 0; q < num_queries; ++q) {
      const float* query = queries + q * kPadded;
      ahead.some();
      Floats sums[kLanes];
      for (int t = 0; t < kLanes; ++t) sums[t] = Floats{};
#pragma GCC unroll 4
      for (int i = 0; i < kPadded; i += kLanes) {
        const Floats part = load(query + i);
#pragma GCC unroll 16
        for (int t = 0; t < kLanes; ++t) sums[t] = fma(part, load(key + t * kPadded + i), sums[t]);
      }
      store(scores + q * kStep + first, sum_each(sums));
    }
  }
}

// Turns the scores of one query into probabilities that are to be divided by `total`; returns what earlier sums are
// multiplied by. Positions outside begin .. end - 1 (counted from the step's first) get exactly 0.
TANDEM_INLINE float soften(float* scores, int begin, int end, float soft_cap, float& largest_of, float& total) {
  const float lowest = -__builtin_inff();
  Floats found[kStep / kLanes], highest = splat(largest_of);
  for (int v = 0; v < kStep / kLanes; ++v) {
    const Ints lane = lane_numbers() + splat(v * kLanes);
    Floats score = load(scores + v * kLanes);
    if (soft_cap > 0) score = tanh(score / splat(soft_cap)) * splat(soft_cap);
    found[v] = select((lane >= splat(begin)) & (lane < splat(end)), score, splat(lowest));
    highest = max(highest, found[v]);
  }
  const float now = largest(highest);
  Floats sums{};
  for (int v = 0; v < kStep / kLanes; ++v) {
    const Floats p = exp(found[v] - splat(now));
    store(scores + v * kLanes, p);
    sums += p;
  }
  const float kept = exp(splat(largest_of - now))[0];
  largest_of = now;
  total = total * kept + sum(sums);
  return kept;
}

// outputs[q] = outputs[q] * kept[q] + sum over t of p[q][t] * values[t], for kQueries queries at once.
template <int kVectors, int kQueries>
TANDEM_INLINE void add_values(float* outputs, const float* p, const float* kept, const Groups& values, int count) {
  constexpr int kPadded = kVectors * kLanes;
  Floats sums[kQueries][kVectors];
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < kVectors; ++i) sums[q][i] = load(outputs + q * kPadded + i * kLanes) * splat(kept[q]);
  }
  for (int t = 0; t < count; ++t) {
    Floats value[kVectors];
    const float* row = values.at[t / kLanes] + t % kLanes * kPadded;
    for (int i = 0; i < kVectors; ++i) value[i] = load(row + i * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q) {
      const Floats weight = splat(p[q * kStep + t]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sums[q][i] = fma(weight, value[i], sums[q][i]);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < kVectors; ++i) store(outputs + q * kPadded + i * kLanes, sums[q][i]);
  }
}

template <int kVectors, int kQueries>
TANDEM_INLINE void add_rest(int num_queries, float* outputs, const float* p, const float* kept, const Groups& values,
                            int count) {
  if constexpr (kQueries > 0) {
    if (num_queries == kQueries) return add_values<kVectors, kQueries>(outputs, p, kept, values, count);
    add_rest<kVectors, kQueries - 1>(num_queries, outputs, p, kept, values, count);
  }
}

// Query heads at once whose sums fit the registers beside one row of V.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
template <int kVectors>
constexpr int kTogether = kVectors * 2 >= kRegisters ? 1 : (kRegisters - kVectors - 2) / kVectors > 4 ? 4
                          : (kRegisters - kVectors - 2) / kVectors < 1 ? 1 : (kRegisters - kVectors - 2) / kVectors;

// A job: rows of a sequence and the KV heads they are computed for. The queries of one head stand together, row by row.
struct Job {
  int sequence, first_head, num_heads, first_row, num_rows;
};

template <int kVectors>
TANDEM_INLINE void start_job(const Attention& a, const Job& job, const Scratch& s) {
  constexpr int kPadded = kVectors * kLanes;
  const int head_dim = a.pool.head_dim;
  int q = 0;
  for (int head = job.first_head; head < job.first_head + job.num_heads; ++head) {
    const Floats scale = splat(a.options.scale * scale_of(a.pool.key_scales, a.pool, a.layer, head));
    for (int row = job.first_row; row < job.first_row + job.num_rows; ++row) {
      for (int of_group = 0; of_group < a.group; ++of_group, ++q) {
        const float* from = a.query + row * a.query_stride + (int64_t)(head * a.group + of_group) * head_dim;
        for (int i = 0; i < kPadded; i += kLanes) {
          store(s.queries + q * kPadded + i, load_first(from + i, larger(0, smaller(kLanes, head_dim - i))) * scale);
          store(s.outputs + q * kPadded + i, Floats{});
        }
        s.largest[q] = -1e30f, s.total[q] = 0;
      }
    }
  }
}

template <int kVectors>
TANDEM_INLINE void finish_job(const Attention& a, const Job& job, const Scratch& s) {
  constexpr int kPadded = kVectors * kLanes;
  const int head_dim = a.pool.head_dim;
  int q = 0;
  for (int head = job.first_head; head < job.first_head + job.num_heads; ++head) {
    const float scale = scale_of(a.pool.value_scales, a.pool, a.layer, head);
    for (int row = job.first_row; row < job.first_row + job.num_rows; ++row) {
      for (int of_group = 0; of_group < a.group; ++of_group, ++q) {
        float* to = a.out + ((int64_t)row * a.options.num_heads + head * a.group + of_group) * head_dim;
        const Floats factor = splat(scale / s.total[q]);
        for (int i = 0; i < head_dim; i += kLanes) {
          store_first(to + i, load(s.outputs + q * kPadded + i) * factor, smaller(kLanes, head_dim - i));
        }
      }
    }
  }
}

// One head's queries, from `first_query` on, and the positions of one step.
template <typename T, int kVectors>
TANDEM_INLINE void attend_step(const Attention& a, const Job& job, const Scratch& s, const int32_t* blocks, int head,
                               int first_query, int first_position, int first, int count, Ahead& ahead) {
  constexpr int kPadded = kVectors * kLanes, kAtOnce = kTogether<kVectors>;
  const int num_queries = job.num_rows * a.group, window = a.options.window;
  const Groups keys = find_groups<T, kVectors>(a, blocks, first, count, 0, head, s.keys);
  const Groups values = find_groups<T, kVectors>(a, blocks, first, count, 1, head, s.values);
  score_step<kVectors>(s.queries + first_query * kPadded, s.scores, keys, num_queries, count, ahead);
  for (int q = 0; q < num_queries; ++q) {
    ahead.some();
    const int position = first_position + q / a.group;
    const int seen_from = window > 0 ? position + 1 - window - first : 0;
    s.kept[q] = soften(s.scores + q * kStep, seen_from, position + 1 - first, a.options.soft_cap,
                       s.largest[first_query + q], s.total[first_query + q]);
  }
  float* outputs = s.outputs + first_query * kPadded;
  int q = 0;
  for (; q + kAtOnce <= num_queries; q += kAtOnce) {
    ahead.some();
    add_values<kVectors, kAtOnce>(outputs + q * kPadded, s.scores + q * kStep, s.kept + q, values, count);
  }
  ahead.some();
  add_rest<kVectors, kAtOnce - 1>(num_queries - q, outputs + q * kPadded, s.scores + q * kStep, s.kept + q, values, count);
}

template <typename T, int kVectors>
void attend(const Attention& a, const Job& job, const Scratch& s) {
  const Batch& batch = a.batch;
  const int last_row = batch.first_rows[job.sequence + 1] - 1, window = a.options.window;
  const int32_t* blocks = batch.block_ids + batch.first_blocks[job.sequence];
  const int first_position = batch.contexts[job.sequence] - 1 - (last_row - job.first_row);  // of the job's first row
  const int end = first_position + job.num_rows;
  const int begin = window > 0 ? larger(0, first_position + 1 - window) / kStep * kStep : 0;
  start_job<kVectors>(a, job, s);
  Ahead ahead;
  for (int first = begin; first < end; first += kStep) {
    // Heads inside: those of a block lie behind each other, and memory is read fastest in long runs.
    for (int head = 0; head < job.num_heads; ++head) {
      const bool is_last = head + 1 == job.num_heads;
      const int next = is_last ? first + kStep : first;
      if (next < end) ahead.begin<T>(a, blocks, next, smaller(kStep, end - next), is_last ? job.first_head : job.first_head + head + 1);
      attend_step<T, kVectors>(a, job, s, blocks, job.first_head + head, head * job.num_rows * a.group, first_position, first,
                               smaller(kStep, end - first), ahead);
    }
  }
  finish_job<kVectors>(a, job, s);
}

template <typename T>
TANDEM_INLINE void attend_any(const Attention& a, const Job& job, const Scratch& s) {
  switch (padded_dim(a.pool.head_dim)) {
    case 16: return attend<T, 16 / kLanes>(a, job, s);
    case 32: return attend<T, 32 / kLanes>(a, job, s);
    case 64: return attend<T, 64 / kLanes>(a, job, s);
    case 80: return attend<T, 80 / kLanes>(a, job, s);
    case 96: return attend<T, 96 / kLanes>(a, job, s);
    case 128: return attend<T, 128 / kLanes>(a, job, s);
    case 192: return attend<T, 192 / kLanes>(a, job, s);
    case 256: return attend<T, 256 / kLanes>(a, job, s);
  }
}

inline void attention_job(void* context, int number, int thread) {
  const Attention& a = *(const Attention*)context;
  int low = 0, high = a.batch.num_sequences;  // the sequence that this job is of
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (a.first_jobs[middle] <= number) low = middle;
    else high = middle;
  }
  const int jobs_per_tile = (int)ceil_div(a.pool.num_kv_heads, a.heads_per_job), within = number - a.first_jobs[low];
  Job job;
  job.sequence = low;
  job.first_head = within % jobs_per_tile * a.heads_per_job;
  job.num_heads = smaller(a.heads_per_job, a.pool.num_kv_heads - job.first_head);
  job.first_row = a.batch.first_rows[low] + within / jobs_per_tile * a.rows_per_job;
  job.num_rows = smaller(a.rows_per_job, a.batch.first_rows[low + 1] - job.first_row);
  const Scratch scratch = scratch_at(a.memory + thread * a.thread_bytes, a.pool.head_dim, a.max_queries);
  with_kv_type(a.pool.type, [&](auto kind) { attend_any<decltype(kind)>(a, job, scratch); });
}

inline void attention(const Context& c, const float* query, int64_t query_stride, const Pool& pool, int layer,
                      const Batch& batch, const AttentionOptions& options, float* out) {
  const int group = options.num_heads / pool.num_kv_heads, rows_per_job = larger(1, kQueries / group);
  // Decode rows of many sequences: all heads of one in a job. Otherwise a head each, so that no thread is without work.
  const bool has_many = batch.num_sequences >= 2 * c.team.num_threads() && batch.num_rows < 2 * batch.num_sequences;
  const int heads_per_job = has_many || c.team.num_threads() == 1 ? pool.num_kv_heads : 1;
  const int max_queries = rows_per_job * group * heads_per_job;
  int32_t* first_jobs = (int32_t*)c.workspace.take(2, (batch.num_sequences + 1) * sizeof(int32_t));
  first_jobs[0] = 0;
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int num_rows = batch.first_rows[s + 1] - batch.first_rows[s];
    first_jobs[s + 1] =
        first_jobs[s] + (int)(ceil_div(num_rows, rows_per_job) * ceil_div(pool.num_kv_heads, heads_per_job));
  }
  const int64_t thread_bytes = ceil_div(scratch_floats(pool.head_dim, max_queries) * 4, 64) * 64;
  char* memory = (char*)c.workspace.take(1, thread_bytes * c.team.num_threads());
  Attention a{query, query_stride, pool,         layer,         batch,      options, out,
              group, max_queries,  rows_per_job, heads_per_job, first_jobs, memory,  thread_bytes};
  c.team.run(first_jobs[batch.num_sequences], attention_job, &a);
}

}  // namespace TANDEM_ISA
