// One decoder layer in one call: the same kernels in the same order as a model that calls them one by one.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"

namespace TANDEM_ISA {

inline void layer(const Context& c, const Layer& l, const Pool& pool, const Batch& batch, const float* cos, const float* sin,
                  float* residual) {
  const int n = batch.num_rows, num_heads = l.attention.num_heads, num_kv_heads = pool.num_kv_heads, dim = pool.head_dim;
  const int64_t query = (int64_t)num_heads * dim, width = query + 2 * (int64_t)num_kv_heads * dim;
  float* normed = (float*)c.workspace.take(3, (int64_t)n * l.hidden_size * 4);
  float* wide = (float*)c.workspace.take(4, (int64_t)n * (width > 2 * l.inner_size ? width : 2 * l.inner_size) * 4);
  float* narrow = (float*)c.workspace.take(5, (int64_t)n * (query > l.inner_size ? query : l.inner_size) * 4);

  rms_norm(c, residual, l.input_norm, l.eps, n, l.hidden_size, normed);
  linear(c, l.qkv, normed, n, Output{wide, width, false});
  rotary(c, wide, width, cos, sin, n, num_heads + num_kv_heads, dim, wide, width);
  write_kv(c, wide + query, width, wide + query + num_kv_heads * dim, width, pool, l.number, batch);
  attention(c, wide, width, pool, l.number, batch, l.attention, narrow);
  linear(c, l.out, narrow, n, Output{residual, l.hidden_size, true});

  rms_norm(c, residual, l.post_norm, l.eps, n, l.hidden_size, normed);
  linear(c, l.gate_up, normed, n, Output{wide, 2 * (int64_t)l.inner_size, false});
  silu_and_mul(c, wide, n, l.inner_size, narrow);
  linear(c, l.down, narrow, n, Output{residual, l.hidden_size, true});
}

}  // namespace TANDEM_ISA
