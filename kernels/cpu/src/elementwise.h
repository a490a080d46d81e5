// What is done row by row: norms, rotation, activation, KV writes, the largest of a row.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace TANDEM_ISA {

using namespace tandem;

constexpr int kFewRows = 16;  // that many are not worth a thread's waking up

// Calls each(row) for every row, on several threads where there are many.
template <typename Each>
TANDEM_INLINE void for_rows(const Context& c, int num_rows, const Each& each) {
  if (num_rows <= kFewRows) {
    for (int row = 0; row < num_rows; ++row) each(row);
    return;
  }
  struct Job {
    const Each& each;
    int num_rows;
  } job{each, num_rows};
  c.team.run(
      (int)ceil_div(num_rows, kFewRows),
      [](void* context, int tile, int) {
        const Job& job = *(const Job*)context;
        for (int row = tile * kFewRows; row < smaller(job.num_rows, (tile + 1) * kFewRows); ++row) job.each(row);
      },
      &job);
}

inline float sum_of_squares(const float* x, int size) {
  Floats sums[4] = {};
  int i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Floats v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (; i < size; i += kLanes) {
    const Floats v = load_first(x + i, smaller(kLanes, size - i));
    sums[0] = fma(v, v, sums[0]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

inline void normalise_row(const float* x, const float* weight, float eps, int size, float* out) {
  const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(x, size) / (float)size + eps);
  for (int i = 0; i < size; i += kLanes) {
    const int n = smaller(kLanes, size - i);
    store_first(out + i, load_first(x + i, n) * splat(inverse) * load_first(weight + i, n), n);
  }
}

inline void rms_norm(const Context& c, const float* x, const float* weight, float eps, int num_rows, int size, float* out) {
  for_rows(c, num_rows, [=](int row) { normalise_row(x + (int64_t)row * size, weight, eps, size, out + (int64_t)row * size); });
}

inline void add_rms_norm(const Context& c, const float* x, float* residual, const float* weight, float eps, int num_rows,
                         int size, float* out) {
  for_rows(c, num_rows, [=](int row) {
    const float* from = x + (int64_t)row * size;
    float* to = residual + (int64_t)row * size;
    for (int i = 0; i < size; i += kLanes) {
      const int n = smaller(kLanes, size - i);
      store_first(to + i, load_first(from + i, n) + load_first(to + i, n), n);
    }
    normalise_row(to, weight, eps, size, out + (int64_t)row * size);
  });
}

// Pairs are (i, i + head_dim / 2); cos and sin are [rows, head_dim], the first half of sin negated. out may be x.
inline void rotate_head(const float* x, const float* cos, const float* sin, int head_dim, float* out) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const int n = smaller(kLanes, half - i);
    const Floats a = load_first(x + i, n), b = load_first(x + half + i, n);
    store_first(out + i, fma(a, load_first(cos + i, n), b * load_first(sin + i, n)), n);
    store_first(out + half + i, fma(b, load_first(cos + half + i, n), a * load_first(sin + half + i, n)), n);
  }
}

inline void rotary(const Context& c, const float* x, int64_t row_stride, const float* cos, const float* sin, int num_rows,
                   int num_heads, int head_dim, float* out, int64_t out_stride) {
  for_rows(c, num_rows, [=](int row) {
    const int64_t angles = (int64_t)row * head_dim;
    for (int head = 0; head < num_heads; ++head) {
      rotate_head(x + row * row_stride + head * head_dim, cos + angles, sin + angles, head_dim,
                  out + row * out_stride + head * head_dim);
    }
  });
}

inline void silu_and_mul(const Context& c, const float* x, int num_rows, int size, float* out) {
  for_rows(c, num_rows, [=](int row) {
    const float *gate = x + (int64_t)row * 2 * size, *up = gate + size;
    for (int i = 0; i < size; i += kLanes) {
      const int n = smaller(kLanes, size - i);
      store_first(out + (int64_t)row * size + i, silu(load_first(gate + i, n)) * load_first(up + i, n), n);
    }
  });
}

// --- KV ------------------------------------------------------------------------------------------------------------------

// Calls with(T{}) where T is what the pool stores.
template <typename With>
TANDEM_INLINE void with_kv_type(KVType type, const With& with) {
  switch (type) {
    case KVType::kFloat32: return with(float{});
    case KVType::kBFloat16: return with(BFloat16{});
    case KVType::kFloat16: return with(Float16{});
    case KVType::kFloat8: return with(Float8{});
    case KVType::kInt8: return with(int8_t{});
  }
}

// Numbers of the pool before slot `offset` of head `head` of K (0) or V (1) of a layer of a block.
TANDEM_INLINE int64_t slot_at(const Pool& pool, int64_t block, int layer, int which, int head, int offset) {
  const int64_t heads = (((block * pool.num_layers + layer) * 2 + which) * pool.num_kv_heads + head) * pool.block_size;
  return (heads + offset) * pool.head_dim;
}

template <typename T>
TANDEM_INLINE void write_head(const float* x, float inverse_scale, int head_dim, T* to) {
  int i = 0;
  for (; i + kLanes <= head_dim; i += kLanes) store_floats(to + i, load(x + i) * splat(inverse_scale));
  if (i < head_dim) {
    T rest[kLanes];
    store_floats(rest, load_first(x + i, head_dim - i) * splat(inverse_scale));
    memcpy(to + i, rest, (head_dim - i) * sizeof(T));
  }
}

TANDEM_INLINE float scale_of(const float* scales, const Pool& pool, int layer, int head) {
  return scales ? scales[layer * pool.num_kv_heads + head] : 1.0f;
}

inline void write_kv(const Context& c, const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                     const Pool& pool, int layer, const Batch& batch) {
  with_kv_type(pool.type, [&](auto kind) {
    using T = decltype(kind);
    for_rows(c, batch.num_rows, [&](int row) {
      for (int head = 0; head < pool.num_kv_heads; ++head) {
        const int block = batch.write_blocks[row], offset = batch.write_offsets[row];
        const int64_t from = (int64_t)head * pool.head_dim;
        write_head(key + row * key_stride + from, 1.0f / scale_of(pool.key_scales, pool, layer, head), pool.head_dim,
                   (T*)pool.data + slot_at(pool, block, layer, 0, head, offset));
        write_head(value + row * value_stride + from, 1.0f / scale_of(pool.value_scales, pool, layer, head), pool.head_dim,
                   (T*)pool.data + slot_at(pool, block, layer, 1, head, offset));
      }
    });
  });
}

// --- the k largest of each row, largest first; of equal ones the lower index first; NaN counts as lowest -------------------

inline void top_k_row(const float* x, int size, int k, float* values, int64_t* ids) {
  const float lowest = -__builtin_inff();
  int found = 0;
  float bar = lowest;  // what a number must exceed once k are found
  for (int i = 0; i < size; i += kLanes) {
    const int n = smaller(kLanes, size - i);
    const Floats v = load_first(x + i, n);
    if (found == k && !(largest(select(v == v, v, splat(lowest))) > bar)) continue;
    for (int j = 0; j < n; ++j) {
      const float value = v[j] == v[j] ? v[j] : lowest;
      if (found == k && !(value > bar)) continue;
      int at = found < k ? found++ : k - 1;
      for (; at > 0 && values[at - 1] < value; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
      values[at] = value, ids[at] = i + j;
      bar = values[found - 1];
    }
  }
}

inline void top_k(const Context& c, const float* x, int num_rows, int size, int k, float* values, int64_t* ids) {
  struct Job {
    const float* x;
    int size, k;
    float* values;
    int64_t* ids;
  } job{x, size, k, values, ids};
  c.team.run(
      num_rows,
      [](void* context, int row, int) {
        const Job& job = *(const Job*)context;
        top_k_row(job.x + (int64_t)row * job.size, job.size, job.k, job.values + (int64_t)row * job.k,
                  job.ids + (int64_t)row * job.k);
      },
      &job);
}

}  // namespace TANDEM_ISA
