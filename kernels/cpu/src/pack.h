// Puts a weight into the order that the products read it in (kernels.h tells the orders).
#pragma once

#include "matmul.h"

namespace TANDEM_ISA {

inline int64_t packed_bytes(Format format, int num_out, int num_in, int group_size) {
  return ceil_div(num_out, kPanel) * panel_bytes(format, num_in, group_size);
}

template <typename T>
TANDEM_INLINE T value_at(const Linear& to, const void* values, int64_t row, int64_t column) {
  return row < to.num_out && column < to.num_in ? ((const T*)values)[row * to.num_in + column] : T{};
}

inline void pack_scales(const Linear& to, const float* from, const void* into) {
  const int num_groups = to.group_size > 0 ? to.num_in / to.group_size : 1;
  for (int64_t panel = 0; panel < ceil_div(to.num_out, kPanel); ++panel) {
    for (int group = 0; group < num_groups; ++group) {
      float scales[kPanel];
      for (int i = 0; i < kPanel; ++i) {
        const int64_t row = panel * kPanel + i;
        scales[i] = row < to.num_out ? from[row * num_groups + group] : 0.0f;
      }
      const int64_t at = (panel * num_groups + group) * kPanel;
      for (int v = 0; v < kPanel; v += kLanes) {
        if (to.group_size > 0) store_floats((Float16*)into + at + v, load(scales + v));
        else store((float*)into + at + v, load(scales + v));
      }
    }
  }
}

inline void pack(const Linear& to, const WeightSource& from) {
  const int padded = padded_inputs(to.format, to.num_in, to.group_size);
  for (int64_t panel = 0; panel < ceil_div(to.num_out, kPanel); ++panel) {
    char* data = (char*)to.data + panel * panel_bytes(to.format, to.num_in, to.group_size);
    for (int i = 0; i < kPanel; ++i) {
      const int64_t row = panel * kPanel + i;
      for (int k = 0; k < padded; ++k) {
        switch (to.format) {
          case Format::kFloat32:
            ((float*)data)[(int64_t)k * kPanel + i] = value_at<float>(to, from.values, row, k);
            break;
          case Format::kBFloat16:
            ((uint16_t*)data)[((int64_t)(k / 2) * kPanel + i) * 2 + k % 2] = value_at<uint16_t>(to, from.values, row, k);
            break;
          case Format::kInt8:
            data[((int64_t)(k / 4) * kPanel + i) * 4 + k % 4] = (char)value_at<uint8_t>(to, from.values, row, k);
            break;
          case Format::kInt4: {
            uint8_t& byte = ((uint8_t*)data)[((int64_t)(k / 8) * kPanel + i) * 4 + k % 4];
            const uint8_t q = value_at<uint8_t>(to, from.values, row, k) & 15;
            byte = k % 8 < 4 ? q : (uint8_t)(byte | q << 4);
            break;
          }
        }
      }
    }
  }
  if (to.scales) pack_scales(to, from.scales, to.scales);
  if (to.offsets) pack_scales(to, from.offsets, to.offsets);
}

}  // namespace TANDEM_ISA
