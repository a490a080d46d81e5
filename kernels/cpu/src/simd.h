// One float vector per instruction set, and the few operations on it that the kernels need.
//
// Included once per instruction set, by isa.cpp, with TANDEM_ISA naming the namespace: nothing here may be shared between
// instruction sets, or the linker could keep the copy that this CPU cannot run. For the same reason no standard templates.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define TANDEM_INLINE inline __attribute__((always_inline))

namespace TANDEM_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));
typedef int8_t SignedBytes __attribute__((vector_size(kVectorBytes / 4)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
struct Float8 { uint8_t bits; };  // e4m3, "fn": no infinity, 448 is the largest

TANDEM_INLINE int smaller(int a, int b) { return a < b ? a : b; }
TANDEM_INLINE int larger(int a, int b) { return a > b ? a : b; }
TANDEM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

TANDEM_INLINE Floats splat(float x) { return Floats{} + x; }
TANDEM_INLINE Ints splat(int32_t x) { return Ints{} + x; }

template <typename V>
TANDEM_INLINE V load_raw(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <typename V>
TANDEM_INLINE void store_raw(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

TANDEM_INLINE Floats load(const float* p) { return load_raw<Floats>(p); }
TANDEM_INLINE void store(float* p, Floats v) { store_raw(p, v); }

// a * b + c, rounded once where the instruction set can; every kernel sums through this, so that a sum has one rounding rule.
TANDEM_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

TANDEM_INLINE Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }
TANDEM_INLINE Floats max(Floats a, Floats b) { return select(a > b, a, b); }
TANDEM_INLINE Floats min(Floats a, Floats b) { return select(a < b, a, b); }
TANDEM_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
TANDEM_INLINE Floats from_bits(Words v) { return (Floats)v; }

TANDEM_INLINE Ints round_to_ints(Floats v) {  // to nearest, ties to even
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)v);
#elif defined(__ARM_NEON)
  return (Ints)vcvtnq_s32_f32((float32x4_t)v);
#else
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the integer in the low bits
  return (Ints)(v + magic) - (Ints)magic;
#endif
}

TANDEM_INLINE Ints lane_numbers() {
  Ints v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// --- parts of a vector ----------------------------------------------------------------------------------------------

TANDEM_INLINE Floats load_first(const float* p, int n) {  // lanes past n are zero and not read
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  Floats v{};
  memcpy(&v, p, n * sizeof(float));
  return v;
#endif
}
TANDEM_INLINE void store_first(float* p, Floats v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  memcpy(p, &v, n * sizeof(float));
#endif
}

// --- sums over lanes, always by the same tree -----------------------------------------------------------------------

template <int kShift>
TANDEM_INLINE Floats swap_lanes(Floats v) {  // lane i gets lane i ^ kShift
  Ints from;
  for (int i = 0; i < kLanes; ++i) from[i] = i ^ kShift;
  return __builtin_shuffle(v, from);
}
template <int kShift>
TANDEM_INLINE Floats sum_pair(Floats a, Floats b) {
  Ints is_b, others;
  for (int i = 0; i < kLanes; ++i) {
    is_b[i] = i & kShift ? i + kLanes : i;
    others[i] = (i & kShift ? kLanes : 0) + (i ^ kShift);
  }
  return __builtin_shuffle(a, b, is_b) + __builtin_shuffle(a, b, others);
}
template <int kShift>
struct SumLanes {
  // v: 2 * kLanes / kShift ... vectors; lane i of the result is the sum over the lanes of v[i].
  static TANDEM_INLINE Floats of(Floats* v) {
    if constexpr (kShift == kLanes) {
      return v[0];
    } else {
      for (int i = 0; i < kLanes / (2 * kShift); ++i) v[i] = sum_pair<kShift>(v[2 * i], v[2 * i + 1]);
      return SumLanes<kShift * 2>::of(v);
    }
  }
};
TANDEM_INLINE Floats sum_each(Floats (&v)[kLanes]) { return SumLanes<1>::of(v); }

template <int kShift = kLanes / 2>
TANDEM_INLINE float sum(Floats v) {
  v += swap_lanes<kShift>(v);
  if constexpr (kShift > 1) return sum<kShift / 2>(v);
  return v[0];
}
template <int kShift = kLanes / 2>
TANDEM_INLINE float largest(Floats v) {
  v = max(v, swap_lanes<kShift>(v));
  if constexpr (kShift > 1) return largest<kShift / 2>(v);
  return v[0];
}

// --- other number formats -------------------------------------------------------------------------------------------

// By intrinsics: GCC takes vectors apart to convert them.
TANDEM_INLINE Words widen(Halves v) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Words);
#endif
}
TANDEM_INLINE Ints widen(SignedBytes v) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32((__m128i)v);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_raw<int64_t>(&v)));
#else
  return __builtin_convertvector(v, Ints);
#endif
}

TANDEM_INLINE Floats halves_to_floats(Halves v) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)v);
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps((__m128i)v);
#elif defined(__ARM_NEON)
  return (Floats)vcvt_f32_f16((float16x4_t)v);
#else
  const Words w = widen(v), magnitude = (w & 0x7fffu) << 13;
  const Floats scaled = from_bits(magnitude) * splat(5.192296858534828e33f);  // 2^112; subnormals come out right
  const Floats wide = from_bits(magnitude + (112u << 23));                    // infinity and NaN
  const Floats found = select((Ints)(magnitude >= (31u << 23)), from_bits((Words)wide | (255u << 23)), scaled);
  return from_bits((Words)found | ((w & 0x8000u) << 16));
#endif
}

TANDEM_INLINE SignedBytes narrow(Ints v) {  // the low bytes
#if defined(__AVX512F__)
  return (SignedBytes)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, SignedBytes);
#endif
}

TANDEM_INLINE Floats load_floats(const float* p) { return load(p); }
TANDEM_INLINE Floats load_floats(const BFloat16* p) { return from_bits(widen(load_raw<Halves>(p)) << 16); }
TANDEM_INLINE Floats load_floats(const Float16* p) { return halves_to_floats(load_raw<Halves>(p)); }
TANDEM_INLINE Floats load_floats(const int8_t* p) {
  return to_floats(widen(load_raw<SignedBytes>(p)));
}
TANDEM_INLINE Floats load_floats(const Float8* p) {
  // Moved up, its bits are a float32's with 120 off the exponent's bias. NaN (0x7f) reads as 480; nothing writes it.
  const Words moved = (Words)(widen(load_raw<SignedBytes>(p)) << 20) & 0x87f00000u;
  return from_bits(moved) * splat(1.329227995784916e36f);  // 2^120
}

TANDEM_INLINE Words round_to_bfloat16(Floats v) {  // in the upper halves; NaN stays NaN
  const Words w = (Words)v;
  const Words rounded = w + (0x7fffu + ((w >> 16) & 1u));
  return (Words)select((Ints)((w & 0x7fffffffu) > 0x7f800000u), from_bits(w | 0x400000u), from_bits(rounded)) & 0xffff0000u;
}

TANDEM_INLINE void store_floats(float* p, Floats v) { store(p, v); }
TANDEM_INLINE void store_floats(BFloat16* p, Floats v) {
  store_raw(p, __builtin_convertvector(round_to_bfloat16(v) >> 16, Halves));
}
TANDEM_INLINE void store_floats(Float16* p, Floats v) {
#if defined(__AVX512F__)
  store_raw(p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  store_raw(p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON)
  store_raw(p, vcvt_f16_f32((float32x4_t)v));
#else
  const Words sign = (Words)v & 0x80000000u;
  const Floats size = from_bits((Words)v & 0x7fffffffu);
  // Adding and taking away a power of two leaves as many bits as a float16 of this size has.
  const Words exponent = (Words)size & 0x7f800000u;
  const Words step = (Words)max(from_bits(exponent + (13u << 23)), splat(0.5f));
  const Floats kept = (size + from_bits(step)) - from_bits(step);
  const Words normal = ((Words)kept - (112u << 23)) >> 13;
  const Words subnormal = (Words)__builtin_convertvector(kept * splat(16777216.0f), Ints);
  Words bits = (Words)select((Ints)((Words)kept < (113u << 23)), from_bits(subnormal), from_bits(normal));
  bits = (Words)select((Ints)((Words)kept >= (143u << 23)), from_bits(Words{} + 0x7c00u), from_bits(bits));
  bits = (Words)select((Ints)((Words)size > 0x7f800000u), from_bits(Words{} + 0x7e00u), from_bits(bits));
  store_raw(p, __builtin_convertvector(bits | (sign >> 16), Halves));
#endif
}
TANDEM_INLINE void store_floats(int8_t* p, Floats v) {
  const Ints rounded = round_to_ints(min(max(v, splat(-127.0f)), splat(127.0f)));
  store_raw(p, narrow(rounded));
}
TANDEM_INLINE void store_floats(Float8* p, Floats v) {
  const Words sign = (Words)v & 0x80000000u;
  const Floats size = min(from_bits((Words)v & 0x7fffffffu), splat(448.0f));
  // Adding and taking away 2^20 units in the last place leaves three bits behind the leading one, rounded to even.
  const Words exponent = (Words)size & 0x7f800000u;
  const Words step = (Words)max(from_bits(exponent + (20u << 23)), splat(16384.0f));  // 2^14: below 2^-6, steps of 2^-9
  const Floats kept = (size + from_bits(step)) - from_bits(step);
  const Words normal = ((Words)kept - (120u << 23)) >> 20;
  const Words subnormal = (Words)__builtin_convertvector(kept * splat(512.0f), Ints);
  const Words bits = (Words)select((Ints)((Words)kept < (121u << 23)), from_bits(subnormal), from_bits(normal));
  store_raw(p, __builtin_convertvector(bits | (sign >> 24), Bytes));
}

// --- functions ------------------------------------------------------------------------------------------------------

TANDEM_INLINE Floats exp(Floats x) {  // within 2 units in the last place; 0 below -87.3, at most e^88.3
  const Floats bounded = min(max(x, splat(-87.3f)), splat(88.3f));
  const Ints n = round_to_ints(bounded * splat(1.44269504088896341f));
  const Floats whole = to_floats(n);
  Floats r = fma(whole, splat(-0.693359375f), bounded);
  r = fma(whole, splat(2.12194440e-4f), r);
  Floats y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r + splat(1.0f));
  const Floats scaled = y * (Floats)((n + 127) << 23);
  return select(x < splat(-87.3f), Floats{}, scaled);
}

TANDEM_INLINE Floats silu(Floats x) { return x / (splat(1.0f) + exp(-x)); }

TANDEM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

TANDEM_INLINE Floats tanh(Floats x) {
  const Floats e = exp(splat(2.0f) * min(max(x, splat(-15.0f)), splat(15.0f)));
  return (e - splat(1.0f)) / (e + splat(1.0f));
}

}  // namespace TANDEM_ISA
