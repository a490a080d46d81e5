// Matrix products: rows of activations times a packed weight.
//
// An output is one sum over the inputs in ascending order, in one lane of one register, for one row as for many: vectors
// and threads only divide outputs and rows. So a row's result does not depend on the rows beside it.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace TANDEM_ISA {

using namespace tandem;

constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;

// Rows that one pass over a panel serves: as many as there are registers for their sums.
#if defined(__AVX512F__)
constexpr int kFloatRows = 14, kIntRows = 6;
#elif defined(__AVX2__)
constexpr int kFloatRows = 6, kIntRows = 2;
#elif defined(__ARM_NEON)
constexpr int kFloatRows = 12, kIntRows = 6;
#else
constexpr int kFloatRows = 4, kIntRows = 2;
#endif

constexpr int kChannelGroup = 64;  // inputs whose activations share a scale where the weight has no groups

#if defined(__AVX512BF16__)
constexpr bool kHasBFloat16 = true;
#else
constexpr bool kHasBFloat16 = false;
#endif

// What the sums are made of; chosen once for each product.
enum class Path { kFloat, kPairs, kPairsAsFloat, kBytes, kBytesAsFloat };

TANDEM_INLINE Path path_of(const Linear& w) {
  switch (w.format) {
    case Format::kFloat32: return Path::kFloat;
    case Format::kBFloat16: return kHasBFloat16 && !w.is_exact ? Path::kPairs : Path::kPairsAsFloat;
    default: return w.is_exact ? Path::kBytesAsFloat : Path::kBytes;
  }
}
TANDEM_INLINE int rows_of(Path path) { return path == Path::kBytes ? kIntRows : kFloatRows; }
TANDEM_INLINE int activation_group(const Linear& w) { return w.group_size > 0 ? w.group_size : kChannelGroup; }

// Inputs with the padding that the packed order needs.
TANDEM_INLINE int padded_inputs(Format format, int num_in, int group_size) {
  switch (format) {
    case Format::kFloat32: return num_in;
    case Format::kBFloat16: return (int)ceil_div(num_in, 2) * 2;
    default: {
      const int group = group_size > 0 ? group_size : kChannelGroup;
      return (int)ceil_div(num_in, group) * group;
    }
  }
}
TANDEM_INLINE int64_t panel_bytes(Format format, int num_in, int group_size) {
  const int64_t weights = (int64_t)padded_inputs(format, num_in, group_size) * kPanel;
  switch (format) {
    case Format::kFloat32: return weights * 4;
    case Format::kBFloat16: return weights * 2;
    case Format::kInt8: return weights;
    default: return weights / 2;
  }
}

// --- activations in the order of use: [input][row] of one tile of rows ---------------------------------------------------

// floats: [in][row]. pairs: [in / 2][row], two bfloat16 each. bytes: [in / 4][row], four int8 each, with scales and sums
// [group][row] behind them.
struct Tile {
  const float* floats;
  const uint32_t* words;
  const float* scales;
  const int32_t* sums;
};

TANDEM_INLINE int64_t tile_bytes(Path path, const Linear& w, int num_rows) {
  const int64_t inputs = padded_inputs(w.format, w.num_in, w.group_size);
  switch (path) {
    case Path::kPairs: return inputs / 2 * 4 * num_rows;
    case Path::kBytes: return (inputs + inputs / activation_group(w) * 8) * num_rows;
    default: return inputs * 4 * num_rows;
  }
}

TANDEM_INLINE Tile tile_at(char* memory, const Linear& w, int num_rows) {
  const int64_t inputs = padded_inputs(w.format, w.num_in, w.group_size);
  const float* scales = (const float*)(memory + inputs * num_rows);
  return Tile{(const float*)memory, (const uint32_t*)memory, scales,
              (const int32_t*)(scales + inputs / activation_group(w) * num_rows)};
}

// Four bytes of a row's input at a time, into their places among the tile's rows.
struct Interleave {
  uint32_t* to;
  int num_rows;

  TANDEM_INLINE void put(int first, Words words) const {  // words first .. of a row
    if (num_rows == 1) return store_raw(to + first, words);
    uint32_t parts[kLanes];
    store_raw(parts, words);
    for (int i = 0; i < kLanes; ++i) to[(int64_t)(first + i) * num_rows] = parts[i];
  }
  TANDEM_INLINE void put_first(int first, Words words, int n) const {
    uint32_t parts[kLanes];
    store_raw(parts, words);
    for (int i = 0; i < n; ++i) to[(int64_t)(first + i) * num_rows] = parts[i];
  }
};

inline void pack_floats(const float* x, int num_in, int num_padded, Interleave to) {
  int k = 0;
  for (; k + kLanes <= num_in; k += kLanes) to.put(k, (Words)load(x + k));
  for (; k < num_padded; k += kLanes) {
    const Floats rest = load_first(x + k, larger(0, smaller(kLanes, num_in - k)));
    to.put_first(k, (Words)rest, smaller(kLanes, num_padded - k));
  }
}

#if defined(__AVX512BF16__)
inline void pack_pairs(const float* x, int num_in, int num_padded, Interleave to) {
  for (int k = 0; k < num_padded; k += 2 * kLanes) {
    const Floats low = load_first(x + k, larger(0, smaller(kLanes, num_in - k)));
    const Floats high = load_first(x + k + kLanes, larger(0, smaller(kLanes, num_in - k - kLanes)));
    const Words pairs = (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    if (k + 2 * kLanes <= num_padded) to.put(k / 2, pairs);
    else to.put_first(k / 2, pairs, (num_padded - k) / 2);
  }
}
#endif

// Rounds groups of inputs to int8 by the largest of each; a group is a multiple of 32.
inline void pack_bytes(const float* x, int num_in, int num_padded, int group, Interleave to, float* scales, int32_t* sums) {
  for (int first = 0; first < num_padded; first += group, scales += to.num_rows, sums += to.num_rows) {
    const int num_valid = larger(0, smaller(group, num_in - first));
    Floats largest_of{};
    for (int k = 0; k < num_valid; k += kLanes) {
      const Floats v = load_first(x + first + k, smaller(kLanes, num_valid - k));
      largest_of = max(largest_of, max(v, -v));
    }
    // Groups of smaller activations count as zeros: 127 / size has to be finite.
    const float size = largest(largest_of), inverse = size > 1e-30f ? 127.0f / size : 0.0f;
    Ints total{};
    for (int k = 0; k < group; k += kLanes) {
      const Ints rounded = round_to_ints(load_first(x + first + k, larger(0, smaller(kLanes, num_valid - k))) * splat(inverse));
      total += rounded;
      uint32_t words[kLanes / 4];
      store_raw(words, narrow(rounded));
      for (int i = 0; i < kLanes / 4; ++i) to.to[(int64_t)((first + k) / 4 + i) * to.num_rows] = words[i];
    }
    int32_t sum_of = 0;
    for (int i = 0; i < kLanes; ++i) sum_of += total[i];
    *scales = size / 127.0f, *sums = sum_of;
  }
}

inline void pack_tile(Path path, const Linear& w, const float* x, int num_rows, char* to) {
  const int padded = padded_inputs(w.format, w.num_in, w.group_size);
  float* scales = (float*)(to + (int64_t)padded * num_rows);
  int32_t* sums = (int32_t*)(scales + (int64_t)padded / activation_group(w) * num_rows);
  for (int m = 0; m < num_rows; ++m, x += w.num_in) {
    const Interleave row{(uint32_t*)to + m, num_rows};
    switch (path) {
#if defined(__AVX512BF16__)
      case Path::kPairs: pack_pairs(x, w.num_in, padded, row); break;
#endif
      case Path::kBytes: pack_bytes(x, w.num_in, padded, activation_group(w), row, scales + m, sums + m); break;
      default: pack_floats(x, w.num_in, padded, row); break;
    }
  }
}

// --- one panel times one tile of rows ------------------------------------------------------------------------------------

template <int M>
struct Sums {
  Floats of[M][kPanelVectors];
};

template <int M>
TANDEM_INLINE void add_products(Sums<M>& sums, const float* x, const Floats* w) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const Floats row = splat(x[m]);
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) sums.of[m][v] = fma(row, w[v], sums.of[m][v]);
  }
}

struct FloatProduct {
  template <int M>
  static void sum(const Linear& w, int panel, const Tile& tile, Sums<M>& sums) {
    const float* weights = (const float*)w.data + (int64_t)panel * w.num_in * kPanel;
    const float* x = tile.floats;
    for (int k = 0; k < w.num_in; ++k, weights += kPanel, x += M) {
      const Floats columns[kPanelVectors] = {load(weights), load(weights + kLanes)};
      add_products<M>(sums, x, columns);
    }
  }
};

#if defined(__AVX512BF16__)
struct PairProduct {
  template <int M>
  static void sum(const Linear& w, int panel, const Tile& tile, Sums<M>& sums) {
    const int num_pairs = padded_inputs(Format::kBFloat16, w.num_in, 0) / 2;
    const uint32_t* weights = (const uint32_t*)w.data + (int64_t)panel * num_pairs * kPanel;
    const uint32_t* x = tile.words;
    for (int k = 0; k < num_pairs; ++k, weights += kPanel, x += M) {
      const __m512bh first = (__m512bh)_mm512_loadu_si512(weights), second = (__m512bh)_mm512_loadu_si512(weights + kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512bh row = (__m512bh)_mm512_set1_epi32((int)x[m]);
        sums.of[m][0] = (Floats)_mm512_dpbf16_ps((__m512)sums.of[m][0], first, row);
        sums.of[m][1] = (Floats)_mm512_dpbf16_ps((__m512)sums.of[m][1], second, row);
      }
    }
  }
};
#endif

struct PairAsFloatProduct {
  template <int M>
  static void sum(const Linear& w, int panel, const Tile& tile, Sums<M>& sums) {
    const int num_pairs = padded_inputs(Format::kBFloat16, w.num_in, 0) / 2;
    const uint32_t* weights = (const uint32_t*)w.data + (int64_t)panel * num_pairs * kPanel;
    const float* x = tile.floats;
    for (int k = 0; k < num_pairs; ++k, weights += kPanel, x += 2 * M) {
      const Words first = load_raw<Words>(weights), second = load_raw<Words>(weights + kLanes);
      const Floats even[kPanelVectors] = {from_bits(first << 16), from_bits(second << 16)};
      const Floats odd[kPanelVectors] = {from_bits(first & 0xffff0000u), from_bits(second & 0xffff0000u)};
      add_products<M>(sums, x, even);
      add_products<M>(sums, x + M, odd);
    }
  }
};

// Four products of unsigned with signed bytes in each lane, added to the lane; exact.
TANDEM_INLINE Ints add_dot4(Ints sum, Words weights, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32((int)x));
#elif defined(__AVX512BW__)
  const __m512i row = _mm512_set1_epi32((int)x), low = _mm512_set1_epi16(0xff);
  const __m512i even = _mm512_and_si512((__m512i)weights, low), odd = _mm512_srli_epi16((__m512i)weights, 8);
  sum += (Ints)_mm512_madd_epi16(even, _mm512_srai_epi16(_mm512_slli_epi16(row, 8), 8));
  return sum + (Ints)_mm512_madd_epi16(odd, _mm512_srai_epi16(row, 8));
#elif defined(__AVX2__)
  const __m256i row = _mm256_set1_epi32((int)x), low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_and_si256((__m256i)weights, low), odd = _mm256_srli_epi16((__m256i)weights, 8);
  sum += (Ints)_mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(row, 8), 8));
  return sum + (Ints)_mm256_madd_epi16(odd, _mm256_srai_epi16(row, 8));
#else
  for (int shift = 0; shift < 32; shift += 8) {
    sum += (Ints)((weights >> shift) & 0xffu) * (int32_t)(int8_t)(x >> shift);
  }
  return sum;
#endif
}

// The scales and offsets of one group of a panel, or of the whole panel.
struct GroupScales {
  Floats scale[kPanelVectors], offset[kPanelVectors];

  TANDEM_INLINE GroupScales(const Linear& w, int64_t group) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t at = group * kPanel + v * kLanes;
      scale[v] = load_floats((const Float16*)w.scales + at);
      offset[v] = w.offsets ? load_floats((const Float16*)w.offsets + at) : Floats{};
    }
  }
};

template <Format kFormat>
TANDEM_INLINE const uint32_t* int_panel(const Linear& w, int panel) {
  return (const uint32_t*)((const char*)w.data + panel * panel_bytes(kFormat, w.num_in, w.group_size));
}
template <Format kFormat>
constexpr int kZero = kFormat == Format::kInt8 ? 128 : 8;  // what stands for zero in a weight without offsets

template <Format kFormat>
struct ByteProduct {
  template <int M>
  static void sum(const Linear& w, int panel, const Tile& tile, Sums<M>& sums) {
    const int group = activation_group(w), num_groups = padded_inputs(kFormat, w.num_in, w.group_size) / group;
    const uint32_t* weights = int_panel<kFormat>(w, panel);
    const uint32_t* x = tile.words;
    for (int g = 0; g < num_groups; ++g) {
      Ints dots[M][kPanelVectors];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const Ints start = splat(w.offsets ? 0 : -kZero<kFormat> * tile.sums[(int64_t)g * M + m]);
        dots[m][0] = start, dots[m][1] = start;
      }
      constexpr int kInputs = kFormat == Format::kInt8 ? 4 : 8;
      for (int k = 0; k < group; k += kInputs, weights += kPanel) {
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v) {
          const Words packed = load_raw<Words>(weights + v * kLanes);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) {
            if constexpr (kFormat == Format::kInt8) {
              dots[m][v] = add_dot4(dots[m][v], packed, x[m]);
            } else {
              dots[m][v] = add_dot4(dots[m][v], packed & 0x0f0f0f0fu, x[m]);
              dots[m][v] = add_dot4(dots[m][v], (packed >> 4) & 0x0f0f0f0fu, x[M + m]);
            }
          }
        }
        x += kInputs / 4 * M;
      }
      if (w.group_size == 0) {
        for (int m = 0; m < M; ++m) {
          const Floats scale = splat(tile.scales[(int64_t)g * M + m]);
          for (int v = 0; v < kPanelVectors; ++v) sums.of[m][v] = fma(to_floats(dots[m][v]), scale, sums.of[m][v]);
        }
        continue;
      }
      const GroupScales scales(w, (int64_t)panel * num_groups + g);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const float scale = tile.scales[(int64_t)g * M + m], total = scale * (float)tile.sums[(int64_t)g * M + m];
        for (int v = 0; v < kPanelVectors; ++v) {
          sums.of[m][v] = fma(to_floats(dots[m][v]), scales.scale[v] * splat(scale), sums.of[m][v]);
          if (w.offsets) sums.of[m][v] = fma(scales.offset[v], splat(total), sums.of[m][v]);
        }
      }
    }
    if (w.group_size == 0) scale_channels<M>(w, panel, sums);
  }

  template <int M>
  static TANDEM_INLINE void scale_channels(const Linear& w, int panel, Sums<M>& sums) {
    const float* scales = (const float*)w.scales + (int64_t)panel * kPanel;
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < kPanelVectors; ++v) sums.of[m][v] *= load(scales + v * kLanes);
    }
  }
};

// The same weights as float32, activations as they are.
template <Format kFormat>
struct ByteAsFloatProduct {
  template <int M>
  static void sum(const Linear& w, int panel, const Tile& tile, Sums<M>& sums) {
    const int group = activation_group(w), num_groups = padded_inputs(kFormat, w.num_in, w.group_size) / group;
    const uint32_t* weights = int_panel<kFormat>(w, panel);
    const float* x = tile.floats;
    constexpr int kInputs = kFormat == Format::kInt8 ? 4 : 8, kBits = 32 / kInputs;
    for (int g = 0; g < num_groups; ++g) {
      Floats scale[kPanelVectors] = {splat(1.0f), splat(1.0f)}, offset[kPanelVectors] = {};
      if (w.group_size > 0) {
        const GroupScales scales(w, (int64_t)panel * num_groups + g);
        for (int v = 0; v < kPanelVectors; ++v) scale[v] = scales.scale[v], offset[v] = scales.offset[v];
      }
      const Ints zero = splat(w.offsets ? 0 : kZero<kFormat>);
      for (int k = 0; k < group; k += kInputs, weights += kPanel) {
        for (int i = 0; i < kInputs; ++i, x += M) {
          // int4: inputs 0..3 are the low halves of the four bytes, 4..7 the high ones
          const int shift = kFormat == Format::kInt8 ? 8 * i : 8 * (i % 4) + 4 * (i / 4);
          Floats columns[kPanelVectors];
          for (int v = 0; v < kPanelVectors; ++v) {
            const Words q = (load_raw<Words>(weights + v * kLanes) >> shift) & ((1u << kBits) - 1);
            columns[v] = fma(to_floats((Ints)q - zero), scale[v], offset[v]);
          }
          add_products<M>(sums, x, columns);
        }
      }
    }
    if (w.group_size == 0) ByteProduct<kFormat>::template scale_channels<M>(w, panel, sums);
  }
};

struct Output {
  float* to;
  int64_t stride;
  bool is_added;  // to what is there
};

template <typename Product, int M>
void multiply_panel(const Linear& w, int panel, const Tile& tile, const Output& out) {
  Sums<M> sums{};
  Product::template sum<M>(w, panel, tile, sums);
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int column = panel * kPanel + v * kLanes, num_valid = smaller(kLanes, w.num_out - column);
      if (num_valid <= 0) break;
      Floats found = sums.of[m][v];
      float* to = out.to + m * out.stride + column;
      if (w.bias) found += load_first(w.bias + column, num_valid);
      if (out.is_added) found += load_first(to, num_valid);
      store_first(to, found, num_valid);
    }
  }
}

template <typename Product, int M>
TANDEM_INLINE void multiply_rows(int num_rows, const Linear& w, int panel, const Tile& tile, const Output& out) {
  if constexpr (M > 0) {
    if (num_rows == M) return multiply_panel<Product, M>(w, panel, tile, out);
    multiply_rows<Product, M - 1>(num_rows, w, panel, tile, out);
  }
}

inline void multiply(Path path, int num_rows, const Linear& w, int panel, const Tile& tile, const Output& out) {
  switch (path) {
    case Path::kFloat: return multiply_rows<FloatProduct, kFloatRows>(num_rows, w, panel, tile, out);
#if defined(__AVX512BF16__)
    case Path::kPairs: return multiply_rows<PairProduct, kFloatRows>(num_rows, w, panel, tile, out);
#endif
    case Path::kBytes:
      if (w.format == Format::kInt8) {
        return multiply_rows<ByteProduct<Format::kInt8>, kIntRows>(num_rows, w, panel, tile, out);
      }
      return multiply_rows<ByteProduct<Format::kInt4>, kIntRows>(num_rows, w, panel, tile, out);
    case Path::kBytesAsFloat:
      if (w.format == Format::kInt8) {
        return multiply_rows<ByteAsFloatProduct<Format::kInt8>, kFloatRows>(num_rows, w, panel, tile, out);
      }
      return multiply_rows<ByteAsFloatProduct<Format::kInt4>, kFloatRows>(num_rows, w, panel, tile, out);
    default: return multiply_rows<PairAsFloatProduct, kFloatRows>(num_rows, w, panel, tile, out);
  }
}

// --- the whole product ---------------------------------------------------------------------------------------------------

constexpr int kRowsAtOnce = 448;          // so that packed activations stay near the core
constexpr int64_t kTileBytes = 32 << 10;  // of weights: enough that taking a tile costs nothing beside it
constexpr int kTilesPerRun = 8;           // tiles of rows that one tile of work multiplies with the same panels

struct Product {
  Path path;
  const Linear& w;
  const float* x;
  int num_rows, rows_per_tile, num_tiles;
  int64_t bytes_per_tile;
  char* memory;
  int panels_per_job, jobs_per_run;
  Output out;
};

inline void pack_job(void* context, int tile, int) {
  const Product& p = *(const Product*)context;
  const int first = tile * p.rows_per_tile;
  pack_tile(p.path, p.w, p.x + (int64_t)first * p.w.num_in, smaller(p.rows_per_tile, p.num_rows - first),
            p.memory + tile * p.bytes_per_tile);
}

inline void multiply_job(void* context, int job, int) {
  const Product& p = *(const Product*)context;
  const int num_panels = (int)ceil_div(p.w.num_out, kPanel);
  const int first_tile = job / p.jobs_per_run * kTilesPerRun, first_panel = job % p.jobs_per_run * p.panels_per_job;
  for (int panel = first_panel; panel < smaller(num_panels, first_panel + p.panels_per_job); ++panel) {
    for (int tile = first_tile; tile < smaller(p.num_tiles, first_tile + kTilesPerRun); ++tile) {
      const int first = tile * p.rows_per_tile, num_rows = smaller(p.rows_per_tile, p.num_rows - first);
      const Output out{p.out.to + first * p.out.stride, p.out.stride, p.out.is_added};
      multiply(p.path, num_rows, p.w, panel, tile_at(p.memory + tile * p.bytes_per_tile, p.w, num_rows), out);
    }
  }
}

inline void multiply_some(const Context& c, const Linear& w, const float* x, int num_rows, const Output& out) {
  const Path path = path_of(w);
  const int rows_per_tile = rows_of(path), num_tiles = (int)ceil_div(num_rows, rows_per_tile);
  const int64_t bytes_per_tile = ceil_div(tile_bytes(path, w, rows_per_tile), 64) * 64;
  char* memory = (char*)c.workspace.take(0, bytes_per_tile * num_tiles);
  const int num_panels = (int)ceil_div(w.num_out, kPanel);
  const int panels_per_job = (int)larger(1, (int)(kTileBytes / panel_bytes(w.format, w.num_in, w.group_size)));
  const int jobs_per_run = (int)ceil_div(num_panels, panels_per_job);
  Product p{path,           w,      x,  num_rows, rows_per_tile, num_tiles, bytes_per_tile, memory,
            panels_per_job, jobs_per_run, out};
  if (num_tiles <= 2) {
    for (int tile = 0; tile < num_tiles; ++tile) pack_job(&p, tile, 0);
  } else {
    c.team.run(num_tiles, pack_job, &p);
  }
  c.team.run(jobs_per_run * (int)ceil_div(num_tiles, kTilesPerRun), multiply_job, &p);
}

inline void linear(const Context& c, const Linear& w, const float* x, int num_rows, const Output& out) {
  for (int first = 0; first < num_rows; first += kRowsAtOnce) {
    multiply_some(c, w, x + (int64_t)first * w.num_in, smaller(kRowsAtOnce, num_rows - first),
                  Output{out.to + first * out.stride, out.stride, out.is_added});
  }
}

}  // namespace TANDEM_ISA
