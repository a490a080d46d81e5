// What every instruction set offers, as one table of functions over plain memory. Shapes are checked by the caller.
//
// All activations are float32 and row-major. Rows of a batch are independent of each other: a row's result does not
// depend on which rows stand beside it, nor on the number of threads.
#pragma once

#include <cstdint>

#include "threads.h"

namespace tandem {

enum class Format : int { kFloat32, kBFloat16, kInt8, kInt4 };
enum class KVType : int { kFloat32, kBFloat16, kFloat16, kFloat8, kInt8 };

// A weight [num_out, num_in] in panels of `panel_width` outputs, each with all its inputs, in the order of use:
//   float32   [panel][in][output]
//   bfloat16  [panel][in / 2][output][2]
//   int8      [panel][in / 4][output][4], unsigned: 128 stands for zero
//   int4      [panel][in / 8][output][4]: a byte holds inputs i (low bits) and i + 4 (high bits) of its eight
// What is past num_out or num_in is zero (its scale is, where there are scales). With group_size > 0 an int weight is
// scale * q + offset with scales and offsets [panel][in / group_size][output] in float16; int8 with group_size 0 is
// scale * (q - 128) with scales [panel][output] in float32.
struct Linear {
  Format format;
  int num_out, num_in;
  int group_size;
  bool is_exact;  // activations stay float32; else rounded to bfloat16, or to int8 in groups (docs/kernels.md)
  const void* data;
  const void* scales;
  const void* offsets;
  const float* bias;  // [num_out] or null
};

// Where weights come from when they are packed: rows first_row .. of a [num_out, num_in] weight.
struct WeightSource {
  const void* values;      // float32, bfloat16; uint8 for int8 and int4 (one q a byte)
  const float* scales;     // [num_out, num_in / group_size], or [num_out] without groups
  const float* offsets;    // [num_out, num_in / group_size] or null
};

// The KV pool: one head of K of one layer of one block is [block_size, head_dim], contiguous.
struct Pool {
  void* data;
  KVType type;
  int num_layers, num_kv_heads, block_size, head_dim;
  const float* key_scales;    // [num_layers, num_kv_heads], what a stored number is multiplied by; null: 1
  const float* value_scales;
};

// One step's rows and how they attend. Sequence s has rows first_rows[s] .. first_rows[s + 1] - 1, which stand at the last
// positions of its contexts[s]; its blocks are block_ids[first_blocks[s]] ...
struct Batch {
  int num_rows, num_sequences;
  const int32_t* first_rows;     // [num_sequences + 1]
  const int32_t* contexts;       // [num_sequences]
  const int32_t* first_blocks;   // [num_sequences + 1]
  const int32_t* block_ids;
  const int32_t* write_blocks;   // [num_rows] where each row's K and V go
  const int32_t* write_offsets;  // [num_rows]
};

struct AttentionOptions {
  int num_heads;
  float scale;
  float soft_cap;  // 0: none
  int window;      // 0: all positions; else a row sees itself and window - 1 before
};

// A decoder layer: normalised attention and normalised SwiGLU, each added to the residual.
struct Layer {
  int number;
  int hidden_size, inner_size;
  float eps;
  const float* input_norm;
  const float* post_norm;
  Linear qkv, out, gate_up, down;
  AttentionOptions attention;
};

// Memory that the kernels work in; it grows and stays.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // At least num_bytes, aligned to a cache line. Raises std::bad_alloc. What was there before may be gone.
  void* take(int slot, int64_t num_bytes);

  static constexpr int kNumSlots = 8;

 private:
  void* data_[kNumSlots] = {};
  int64_t size_[kNumSlots] = {};
};

struct Context {
  Team& team;
  Workspace& workspace;
};

struct Kernels {
  const char* name;
  int panel_width;
  bool has_bfloat16;  // products of bfloat16 pairs in hardware
  int64_t (*packed_bytes)(Format format, int num_out, int num_in, int group_size);
  void (*pack)(const Linear& to, const WeightSource& from);
  void (*linear)(const Context& c, const Linear& weight, const float* x, int num_rows, float* out);
  void (*rms_norm)(const Context& c, const float* x, const float* weight, float eps, int num_rows, int size, float* out);
  void (*add_rms_norm)(const Context& c, const float* x, float* residual, const float* weight, float eps, int num_rows,
                       int size, float* out);
  void (*rotary)(const Context& c, const float* x, int64_t row_stride, const float* cos, const float* sin, int num_rows,
                 int num_heads, int head_dim, float* out);
  void (*silu_and_mul)(const Context& c, const float* x, int num_rows, int size, float* out);
  void (*write_kv)(const Context& c, const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                   const Pool& pool, int layer, const Batch& batch);
  void (*attention)(const Context& c, const float* query, int64_t query_stride, const Pool& pool, int layer,
                    const Batch& batch, const AttentionOptions& options, float* out);
  void (*top_k)(const Context& c, const float* x, int num_rows, int size, int k, float* values, int64_t* ids);
  float (*read_all)(const float* data, int64_t num_floats);
  int64_t (*multiply_all)(Format format, int64_t rounds);
  void (*layer)(const Context& c, const Layer& layer, const Pool& pool, const Batch& batch, const float* cos,
                const float* sin, float* residual);
};

// The tables of the instruction sets; which of them a build has, its TANDEM_HAS_ macros say.
const Kernels* kernels_avx512_bf16();
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_neon();
const Kernels* kernels_scalar();

}  // namespace tandem
