// Products in 16-bit integers (cpu/*_integer.inl): the same bits on every instruction set.
#pragma once
#include <cstdint>

#include "blocks.h"

namespace edgees {

constexpr int kGroup = 32;  // activations that share a step
constexpr uint8_t kNaturalOrder[kGroup] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                           11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                           22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
constexpr int kCodeLimit = 1 << 12;  // |code| < 2^12, |activation| <= 2^14: a group's dot fits

EDGEES_INLINE float power_of_two(int e) { return float_of(static_cast<uint32_t>(127 + e) << 23); }

// Step of a group of activations of which the largest has the bits `top` (sign cleared), and its
// inverse. A group that is not finite gets the step NaN, and so does all that it is multiplied
// with.
EDGEES_INLINE float step_of(uint32_t top, float* inverse) {
  const int exponent = static_cast<int>(top >> 23);
  if (exponent == 255) {
    *inverse = 0.0f;
    return float_of(0x7FC00000u);
  }
  const int e = (exponent < 14 ? 14 : exponent) - 127 - 13;
  *inverse = power_of_two(-e);
  return power_of_two(e);
}

// Pieces of rows of a block type with their residual planes (bits 0: none).
struct Rows {
  int type;
  const uint8_t* base;
  int64_t base_stride;
  int bits, span;
  const uint8_t* plane;
  int64_t plane_stride;
  // How far ahead lies what is read next, to be prefetched; 0: nothing does.
  int64_t next_base, next_plane;
  // Tables alone: absmax of every 64 weights, apart from the codes in base. Null: blocks.
  const float* absmax = nullptr;
  int64_t absmax_stride = 0;
};

// A row of a type with a table: codes and absmax of block i, wherever they lie.
struct TableRow {
  const uint8_t *codes, *absmax;
  int64_t step, absmax_step;
  EDGEES_METHOD TableRow(const Rows& from, int64_t row)
      : codes(from.base + row * from.base_stride + (from.absmax ? 0 : 4)),
        absmax(from.absmax
                   ? reinterpret_cast<const uint8_t*>(from.absmax + row * from.absmax_stride)
                   : codes - 4),
        step(from.absmax ? 32 : static_cast<int64_t>(sizeof(Table4))),
        absmax_step(from.absmax ? 4 : step) {}
  EDGEES_METHOD float d(int64_t i) const {
    float f;
    memcpy(&f, absmax + i * absmax_step, 4);
    return f;
  }
  EDGEES_METHOD const uint8_t* qs(int64_t i) const { return codes + i * step; }
};

// Rows of weights as integers: w = scale * q (+ offset), scale[g * stride + row] for group g.
struct Codes16 {
  int16_t* q;  // in each group of 32 in the order that Kernels::order tells
  int64_t ld;
  float* scale;
  float* offset;
  bool offsets;    // else there are none. Only where a group is 32 wide
  int64_t stride;  // at least the rows; for `column` rounded up to 16, all readable
  int group;       // 32 or 16
};

constexpr int kSignRows = 16, kSignColumns = 8;  // of one call of `sign_columns`

struct SignColumn {
  const int32_t* table;
  const float* scale;  // of its groups
  float* y;
};

}  // namespace edgees
