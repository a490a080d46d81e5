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

constexpr int kStep = 32;       // positions; a multiple of every block size
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
  int rows_per_job;
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

// One position's K or V: where it stands, or a copy in float32.
template <typename T, int kVectors>
TANDEM_INLINE void gather_step(const Attention& a, const int32_t* blocks, int first, int count, int which, int head,
                               float* copies, const float** rows) {
  const Pool& pool = a.pool;
  constexpr int kPadded = kVectors * kLanes;
  for (int t = 0; t < count; ++t) {
    const int position = first + t;
    const int64_t at = slot_at(pool, blocks[position / pool.block_size], a.layer, which, head, position % pool.block_size);
    const T* from = (const T*)pool.data + at;
    if constexpr (__is_same(T, float)) {
      if (pool.head_dim == kPadded) {
        rows[t] = from;
        continue;
      }
    }
    float* to = copies + t * kPadded;
    if (pool.head_dim == kPadded) {
      for (int i = 0; i < kPadded; i += kLanes) store(to + i, load_floats(from + i));
    } else {
      T padded[kPadded] = {};
      memcpy(padded, from, pool.head_dim * sizeof(T));
      for (int i = 0; i < kPadded; i += kLanes) store(to + i, load_floats(padded + i));
    }
    rows[t] = to;
  }
}

// scores[q][t] of all queries with the positions of a step; sums over head_dim lane by lane, then over lanes.
template <int kVectors>
TANDEM_INLINE void score_step(const Scratch& s, const float** keys, int num_queries, int count) {
  constexpr int kPadded = kVectors * kLanes;
  for (int q = 0; q < num_queries; ++q) {
    const float* query = s.queries + q * kPadded;
    for (int first = 0; first < count; first += kLanes) {
      Floats sums[kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t) {
        sums[t] = Floats{};
        const float* key = keys[first + t < count ? first + t : count - 1];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) sums[t] = fma(load(query + i * kLanes), load(key + i * kLanes), sums[t]);
      }
      store(s.scores + q * kStep + first, sum_each(sums));
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
TANDEM_INLINE void add_values(float* outputs, const float* p, const float* kept, const float** values, int count) {
  constexpr int kPadded = kVectors * kLanes;
  Floats sums[kQueries][kVectors];
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < kVectors; ++i) sums[q][i] = load(outputs + q * kPadded + i * kLanes) * splat(kept[q]);
  }
  for (int t = 0; t < count; ++t) {
    Floats value[kVectors];
    for (int i = 0; i < kVectors; ++i) value[i] = load(values[t] + i * kLanes);
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

// Query heads at once whose sums fit the registers beside one row of V.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
template <int kVectors>
constexpr int kTogether = kVectors * 2 >= kRegisters ? 1 : (kRegisters - kVectors - 2) / kVectors > 4 ? 4
                          : (kRegisters - kVectors - 2) / kVectors < 1 ? 1 : (kRegisters - kVectors - 2) / kVectors;

template <typename T, int kVectors>
void attend(const Attention& a, int sequence, int head, int first_row, int num_rows, const Scratch& s) {
  constexpr int kPadded = kVectors * kLanes;
  const Batch& batch = a.batch;
  const int head_dim = a.pool.head_dim, num_queries = num_rows * a.group;
  const int context = batch.contexts[sequence], last_row = batch.first_rows[sequence + 1] - 1;
  const int32_t* blocks = batch.block_ids + batch.first_blocks[sequence];
  const int first_position = context - 1 - (last_row - first_row);  // of the job's first row
  const float scale = a.options.scale * scale_of(a.pool.key_scales, a.pool, a.layer, head);
  const int heads = head * a.group;
  for (int q = 0; q < num_queries; ++q) {
    const float* from = a.query + (first_row + q / a.group) * a.query_stride + (int64_t)(heads + q % a.group) * head_dim;
    for (int i = 0; i < kPadded; i += kLanes) {
      store(s.queries + q * kPadded + i, load_first(from + i, larger(0, smaller(kLanes, head_dim - i))) * splat(scale));
      store(s.outputs + q * kPadded + i, Floats{});
    }
    s.largest[q] = -1e30f, s.total[q] = 0;
  }
  const int window = a.options.window, end = first_position + num_rows;
  const int begin = window > 0 ? larger(0, first_position + 1 - window) / kStep * kStep : 0;
  for (int first = begin; first < end; first += kStep) {
    const int count = smaller(kStep, end - first);
    const float *keys[kStep], *values[kStep];
    gather_step<T, kVectors>(a, blocks, first, count, 0, head, s.keys, keys);
    gather_step<T, kVectors>(a, blocks, first, count, 1, head, s.values, values);
    score_step<kVectors>(s, keys, num_queries, count);
    for (int q = 0; q < num_queries; ++q) {
      const int position = first_position + q / a.group;
      const int seen_from = window > 0 ? position + 1 - window - first : 0;
      s.kept[q] = soften(s.scores + q * kStep, seen_from, position + 1 - first, a.options.soft_cap, s.largest[q], s.total[q]);
    }
    constexpr int kAtOnce = kTogether<kVectors>;
    int q = 0;
    for (; q + kAtOnce <= num_queries; q += kAtOnce) {
      add_values<kVectors, kAtOnce>(s.outputs + q * kPadded, s.scores + q * kStep, s.kept + q, values, count);
    }
    for (; q < num_queries; ++q) {
      add_values<kVectors, 1>(s.outputs + q * kPadded, s.scores + q * kStep, s.kept + q, values, count);
    }
  }
  const float value_scale = scale_of(a.pool.value_scales, a.pool, a.layer, head);
  for (int q = 0; q < num_queries; ++q) {
    float* to = a.out + ((int64_t)(first_row + q / a.group) * a.options.num_heads + heads + q % a.group) * head_dim;
    const Floats factor = splat(value_scale / s.total[q]);
    for (int i = 0; i < head_dim; i += kLanes) {
      store_first(to + i, load(s.outputs + q * kPadded + i) * factor, smaller(kLanes, head_dim - i));
    }
  }
}

template <typename T>
TANDEM_INLINE void attend_any(const Attention& a, int sequence, int head, int first_row, int num_rows, const Scratch& s) {
  switch (padded_dim(a.pool.head_dim)) {
    case 16: return attend<T, 16 / kLanes>(a, sequence, head, first_row, num_rows, s);
    case 32: return attend<T, 32 / kLanes>(a, sequence, head, first_row, num_rows, s);
    case 64: return attend<T, 64 / kLanes>(a, sequence, head, first_row, num_rows, s);
    case 80: return attend<T, 80 / kLanes>(a, sequence, head, first_row, num_rows, s);
    case 96: return attend<T, 96 / kLanes>(a, sequence, head, first_row, num_rows, s);
    case 128: return attend<T, 128 / kLanes>(a, sequence, head, first_row, num_rows, s);
    case 192: return attend<T, 192 / kLanes>(a, sequence, head, first_row, num_rows, s);
    case 256: return attend<T, 256 / kLanes>(a, sequence, head, first_row, num_rows, s);
  }
}

inline void attention_job(void* context, int job, int thread) {
  const Attention& a = *(const Attention*)context;
  const int num_heads = a.pool.num_kv_heads;
  int low = 0, high = a.batch.num_sequences;  // the sequence whose jobs hold this one
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (a.first_jobs[middle] <= job) low = middle;
    else high = middle;
  }
  const int within = job - a.first_jobs[low], head = within % num_heads;
  const int first_row = a.batch.first_rows[low] + within / num_heads * a.rows_per_job;
  const int num_rows = smaller(a.rows_per_job, a.batch.first_rows[low + 1] - first_row);
  const Scratch scratch = scratch_at(a.memory + thread * a.thread_bytes, a.pool.head_dim, a.max_queries);
  with_kv_type(a.pool.type, [&](auto kind) { attend_any<decltype(kind)>(a, low, head, first_row, num_rows, scratch); });
}

inline void attention(const Context& c, const float* query, int64_t query_stride, const Pool& pool, int layer,
                      const Batch& batch, const AttentionOptions& options, float* out) {
  const int group = options.num_heads / pool.num_kv_heads, rows_per_job = larger(1, kQueries / group);
  const int max_queries = rows_per_job * group;
  int32_t* first_jobs = (int32_t*)c.workspace.take(2, (batch.num_sequences + 1) * sizeof(int32_t));
  first_jobs[0] = 0;
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int num_rows = batch.first_rows[s + 1] - batch.first_rows[s];
    first_jobs[s + 1] = first_jobs[s] + (int)ceil_div(num_rows, rows_per_job) * pool.num_kv_heads;
  }
  const int64_t thread_bytes = ceil_div(scratch_floats(pool.head_dim, max_queries) * 4, 64) * 64;
  char* memory = (char*)c.workspace.take(1, thread_bytes * c.team.num_threads());
  Attention a{query, query_stride, pool,         layer,      batch,  options,     out,
              group, max_queries,  rows_per_job, first_jobs, memory, thread_bytes};
  c.team.run(first_jobs[batch.num_sequences], attention_job, &a);
}

}  // namespace TANDEM_ISA
