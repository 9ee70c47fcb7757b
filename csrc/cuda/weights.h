// One tuned tensor as kernels see it, and its weights one by one or in groups. The structures are
// those of edgees/cuda.py.
#pragma once
#include "device.h"

namespace edgees {

// Rows one after the other. NF4, FP4: bitsandbytes' layout of the flattened matrix, element 2i in
// the high half of byte i, an absmax for every 64: absmax, or where that is null
// code[quantised[i]] * absmax2[i / 256] + offset.
struct Weight {
  const void* base;
  const float* absmax;
  const uint8_t* quantised;
  const float* code;
  const float* absmax2;
  const uint8_t* plane;  // residual plane, [rows][ceil(cols / 32) * 4 * bits]
  int64_t rows, cols;
  float offset;
  float cell;     // of float types; absmax / 8 otherwise
  float part;     // 2^(span - bits): a plane's step in cells
  int32_t type;   // kF32 ...
  int32_t bits;   // of the plane; 0: none
  int32_t whole;  // cols is a multiple of 32 and base and plane are aligned to 16 bytes
};

// Members and their noise. key, amplitude, slot: [members]; owner: [n], whose each column or row
// is.
struct Noise {
  const uint64_t* key;  // null: all are the centre
  const float* amplitude;
  const uint32_t* slot;
  const int32_t* owner;
  float rho, scale;  // eps is an integer times scale, a member's noise amplitude * rho * eps
  int32_t kind, rank;
  uint32_t tensor;
  // The adapter's view: A [rows][factors], and the right factors [factors][ceil(cols / 128) * 4].
  int32_t factors;
  const float* a;
  const uint32_t* pool;
};

// amplitude * rho * scale of a member, rounded as csrc/product.cpp does.
EDGEES_DEVICE float strength(const Noise& e, int32_t member) {
  return e.key ? __fmul_rn(__fmul_rn(__ldg(e.amplitude + member), e.rho), e.scale) : 0.0f;
}
// Which factor of the pool is right factor k of a member.
EDGEES_DEVICE int pool_index(const Noise& e, int32_t member, int k) {
  return static_cast<int>((static_cast<uint64_t>(__ldg(e.slot + member)) * e.rank + k) %
                          static_cast<uint64_t>(e.factors));
}

// bitsandbytes' tables (csrc/blocks.h holds them for the host).
static __device__ const float kTables[2][16] = {
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
     -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
     0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
     0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f, 0.0f, -0.0625f / 12,
     -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f}};

EDGEES_DEVICE bool has_codes(int type) { return type >= kNF4Type; }

// The table where a warp can index it without conflicts: call from all threads, then synchronise.
struct Table {
  float value[16];
};
EDGEES_DEVICE void fill(Table& t, int type, int thread) {
  if (has_codes(type) && thread < 16) t.value[thread] = kTables[type - kNF4Type][thread];
}

EDGEES_DEVICE float absmax_at(const Weight& w, int64_t block) {
  if (w.absmax) return __ldg(w.absmax + block);
  const float v =
      __fmul_rn(__ldg(w.code + __ldg(w.quantised + block)), __ldg(w.absmax2 + (block >> 8)));
  return __fadd_rn(v, w.offset);
}

// Step of the plane at a flat element.
EDGEES_DEVICE float step_of(const Weight& w, float absmax) {
  const float cell = has_codes(w.type) ? __fmul_rn(fabsf(absmax), 0.125f) : w.cell;
  return __fmul_rn(cell, w.part);
}
// How far the plane moves a weight, in steps: code minus the middle of a group of 32's element k.
EDGEES_DEVICE int plane_move(const Weight& w, int64_t row, int64_t col) {
  const int bits = w.bits, k = static_cast<int>(col & 31);
  const uint8_t* p = w.plane + (row * ((w.cols + 31) / 32) + col / 32) * 4 * bits;
  const int each = 4 * bits;  // bytes; byte i holds elements i, i + each, ...
  return (__ldg(p + k % each) >> bits * (k / each) & ((1 << bits) - 1)) - (1 << (bits - 1));
}

// One weight with its plane, the bits of csrc's decoders.
EDGEES_DEVICE float weight_at(const Weight& w, const Table& t, int64_t row, int64_t col) {
  const int64_t i = row * w.cols + col;
  float v, absmax = 0.0f;
  if (has_codes(w.type)) {
    absmax = absmax_at(w, i >> 6);
    const int both = __ldg(static_cast<const uint8_t*>(w.base) + (i >> 1));
    v = __fmul_rn(t.value[i & 1 ? both & 15 : both >> 4], absmax);
  } else {
    v = load(w.base, i, w.type);
  }
  if (w.bits) {
    v = __fadd_rn(v, __fmul_rn(step_of(w, absmax), static_cast<float>(plane_move(w, row, col))));
  }
  return v;
}

// The integer of the dense noise at (row, col), as a float.
EDGEES_DEVICE float dense_at(int kind, uint64_t key, uint32_t tensor, uint32_t row, int64_t col) {
  if (kind == kNormal) {
    const Words4 v = noise_block(key, col >> 3, row, tensor, kStreamNormal);
    return normal_at(half_at(v, static_cast<int>(col & 7)));
  }
  return sign_at(key, col, row, tensor, kStreamSign) ? -1.0f : 1.0f;
}

// Eight codes of a word (element 2i in the high half of byte i) times absmax.
EDGEES_DEVICE void decode8(const Table& t, uint32_t word, float absmax, float* out) {
  EDGEES_UNROLL
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = t.value[word >> (8 * i + 4) & 15] * absmax;
    out[2 * i + 1] = t.value[word >> 8 * i & 15] * absmax;
  }
}
// Adds the plane to elements 8p..8p+7 of a group of 32; `w.whole`.
EDGEES_DEVICE void move8(const Weight& w, int64_t row, int64_t group, int p, float step,
                         float* out) {
  const int bits = w.bits;
  const uint8_t* at = w.plane + (row * (w.cols / 32) + group) * 4 * bits;
  const int shift = bits == 8 ? 0 : bits == 4 ? 4 * (p >> 1) : 2 * p;
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(at + 8 * (bits == 8   ? p
                                                                 : bits == 4 ? p & 1
                                                                             : 0)));
  const float middle = static_cast<float>(1 << (bits - 1));
  const uint32_t mask = (1u << bits) - 1;
  EDGEES_UNROLL
  for (int k = 0; k < 8; ++k) {
    const uint32_t code = (k < 4 ? v.x : v.y) >> (8 * (k & 3) + shift) & mask;
    out[k] += step * (static_cast<float>(code) - middle);
  }
}

// What is multiplied into the member's left signs k for a column whose sign dots are `dots`, and
// the sum over k of the lowrank noise of one output.
EDGEES_DEVICE float lowrank_output(const Noise& e, int32_t member, float c, const float* dots,
                                   int64_t row, float y) {
  const uint64_t key = __ldg(e.key + member);
  for (int k = 0; k < e.rank; ++k) {
    const float by = c * dots[e.factors ? pool_index(e, member, k) : k];
    y += flip(by, sign_at(key, row, 0, e.tensor, kStreamLeft + static_cast<uint32_t>(k)));
  }
  return y;
}

}  // namespace edgees
