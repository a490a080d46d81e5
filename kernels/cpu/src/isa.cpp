// Every kernel for one instruction set: compiled once for each, with its flags and TANDEM_ISA.
#include "attention.h"
#include "ceilings.h"
#include "elementwise.h"
#include "kernels.h"
#include "layer.h"
#include "matmul.h"
#include "pack.h"

#define TANDEM_TEXT_OF(x) #x
#define TANDEM_TEXT(x) TANDEM_TEXT_OF(x)
#define TANDEM_JOIN_OF(a, b) a##b
#define TANDEM_JOIN(a, b) TANDEM_JOIN_OF(a, b)

namespace tandem {

const Kernels* TANDEM_JOIN(kernels_, TANDEM_ISA)() {
  namespace isa = TANDEM_ISA;
  static constexpr Kernels kernels = {
      .name = TANDEM_TEXT(TANDEM_ISA),
      .panel_width = isa::kPanel,
      .has_bfloat16 = isa::kHasBFloat16,
      .packed_bytes = isa::packed_bytes,
      .pack = isa::pack,
      .linear = [](const Context& c, const Linear& weight, const float* x, int num_rows,
                   float* out) { isa::linear(c, weight, x, num_rows, isa::Output{out, weight.num_out, false}); },
      .rms_norm = isa::rms_norm,
      .add_rms_norm = isa::add_rms_norm,
      .rotary = [](const Context& c, const float* x, int64_t row_stride, const float* cos, const float* sin, int num_rows,
                   int num_heads, int head_dim, float* out) {
        isa::rotary(c, x, row_stride, cos, sin, num_rows, num_heads, head_dim, out, (int64_t)num_heads * head_dim);
      },
      .silu_and_mul = isa::silu_and_mul,
      .write_kv = isa::write_kv,
      .attention = isa::attention,
      .top_k = isa::top_k,
      .read_all = isa::read_all,
      .multiply_all = isa::multiply_all,
      .layer = isa::layer,
  };
  return &kernels;
}

}  // namespace tandem
