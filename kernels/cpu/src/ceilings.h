// What this core can do at best, for judging the kernels: reading memory, and multiplying what is in registers.
#pragma once

#include "kernels.h"
#include "matmul.h"
#include "simd.h"

namespace TANDEM_ISA {

template <typename V>
TANDEM_INLINE void keep(V& v) {  // as if somebody looked at it
#if defined(__x86_64__)
  asm volatile("" : "+x"(v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(v));
#endif
}

// Reads all of it once; the sum keeps the compiler from leaving it out.
inline float read_all(const float* data, int64_t num_floats) {
  Floats sums[4] = {};
  for (int64_t i = 0; i + 4 * kLanes <= num_floats; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) sums[j] += load(data + i + j * kLanes);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Multiplies and adds in registers only, `rounds` times 12 vectors in the way of this format's products; returns how many
// multiplications and additions that were.
inline int64_t multiply_all(Format format, int64_t rounds) {
  constexpr int kSums = 12;
  int64_t per_lane = 2;
  if (format == Format::kFloat32 || (format == Format::kBFloat16 && !kHasBFloat16)) {
    Floats sums[kSums] = {};
    Floats a = splat(0.5f), b = splat(0.25f);
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < kSums; ++j) sums[j] = fma(a, b, sums[j]);
#pragma GCC unroll 12
      for (int j = 0; j < kSums; ++j) keep(sums[j]);
    }
#if defined(__AVX512BF16__)
  } else if (format == Format::kBFloat16) {
    per_lane = 4;
    Floats sums[kSums] = {};
    const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f003f00);
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < kSums; ++j) sums[j] = (Floats)_mm512_dpbf16_ps((__m512)sums[j], a, a);
#pragma GCC unroll 12
      for (int j = 0; j < kSums; ++j) keep(sums[j]);
    }
#endif
  } else {
    per_lane = 8;
    Ints sums[kSums] = {};
    const Words a = Words{} + 0x01010101u;
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < kSums; ++j) sums[j] = add_dot4(sums[j], a, 0x01010101u);
#pragma GCC unroll 12
      for (int j = 0; j < kSums; ++j) keep(sums[j]);
    }
  }
  return rounds * kSums * kLanes * per_lane;
}

}  // namespace TANDEM_ISA
