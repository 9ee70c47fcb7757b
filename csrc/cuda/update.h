// Rows and vectors of members, and the update: element by element, and the same bits as csrc's
// product.cpp, update.cpp and plane.cpp: no product is fused with a sum here.
#pragma once
#include "weights.h"

namespace edgees {

// Rows of mixed members' matrices (embeddings): out[i] = row index[i] for member owner[i].
struct Lookup {
  Weight w;
  Noise e;
  const int64_t* index;
  void* out;  // [n][cols] of out_type
  int64_t n;
  int32_t out_type;
};

// gridDim: (n, pieces of blockDim.x columns).
EDGEES_DEVICE void rows(const Lookup& p) {
  EDGEES_SHARED(Table, table);
  fill(table, p.w.type, threadIdx.x);
  __syncthreads();
  const int64_t i = blockIdx.x, row = __ldg(p.index + i);
  const int64_t col = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (col >= p.w.cols) return;
  if (row < 0 || row >= p.w.rows) {  // seen in the output, not in someone else's memory
    store(p.out, i * p.w.cols + col, p.out_type, with_bits(0x7FC00000u));
    return;
  }
  float v = weight_at(p.w, table, row, col);
  const int64_t words = sign_word_count(p.w.cols);
  if (p.e.factors) {
    float learned = 0.0f;
    for (int f = 0; f < p.e.factors; ++f) {
      const float a = __ldg(p.e.a + row * p.e.factors + f);
      learned = __fadd_rn(learned, flip(a, packed_sign(p.e.pool + f * words, col)));
    }
    v = __fadd_rn(v, learned);
  }
  const int32_t member = p.e.key ? p.e.owner[i] : 0;
  const float cs = strength(p.e, member);
  if (cs != 0.0f) {
    const uint64_t key = __ldg(p.e.key + member);
    if (p.e.kind == kLowrank) {
      int sum = 0;
      for (int k = 0; k < p.e.rank; ++k) {
        const uint32_t s = static_cast<uint32_t>(k);
        const uint32_t a = sign_at(key, row, 0, p.e.tensor, kStreamLeft + s);
        const uint32_t b = p.e.factors
                               ? packed_sign(p.e.pool + pool_index(p.e, member, k) * words, col)
                               : sign_at(key, col, 0, p.e.tensor, kStreamRight + s);
        sum += a ^ b ? -1 : 1;
      }
      v = __fadd_rn(v, __fmul_rn(cs, static_cast<float>(sum)));
    } else {
      const float e = dense_at(p.e.kind, key, p.e.tensor, static_cast<uint32_t>(row), col);
      v = __fadd_rn(v, __fmul_rn(cs, e));
    }
  }
  store(p.out, i * p.w.cols + col, p.out_type, v);
}

// 1-D tensors (norm weights, biases): out[i] = base + delta + noise of member owner[i], or of
// member i where owner is null. Lowrank has dense signs here.
struct Vector {
  const void* base;
  const float* delta;  // [cols], may be null
  Noise e;
  void* out;  // [n][cols] of out_type
  int64_t n, cols;
  int32_t base_type, out_type;
};

// gridDim: as for rows.
EDGEES_DEVICE void vectors(const Vector& p) {
  const int64_t i = blockIdx.x;
  const int64_t col = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (col >= p.cols) return;
  float v = load(p.base, col, p.base_type);
  if (p.delta) v = __fadd_rn(v, __ldg(p.delta + col));
  const int32_t member = p.e.key && p.e.owner ? p.e.owner[i] : static_cast<int32_t>(i);
  const float cs = strength(p.e, member);
  if (cs != 0.0f) {
    const float e = dense_at(p.e.kind, __ldg(p.e.key + member), p.e.tensor, 0, col);
    v = __fadd_rn(v, __fmul_rn(cs, e));
  }
  store(p.out, i * p.cols + col, p.out_type, v);
}

// delta = keep * delta + sum over pairs of coef * eps, for rows row0.. of a tensor; also the noise
// itself, with one pair, coef 1 and keep 0.
struct Delta {
  float* delta;  // [rows][cols]
  int64_t rows, cols, row0;
  const uint64_t* key;  // [pairs]
  const float* coef;
  float keep, scale;
  int32_t pairs, kind, rank, vector;
  uint32_t tensor;
};

// A warp to 128 columns of a row, four to a lane; gridDim: (pieces of the row, rows) in warps.
EDGEES_DEVICE void delta_apply(const Delta& p) {
  const int lane = threadIdx.x;
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t r = static_cast<int64_t>(blockIdx.y) + static_cast<int64_t>(blockIdx.z) * gridDim.y;
  if (piece * 128 >= p.cols || r >= p.rows) return;  // a warp as a whole
  const int64_t col = piece * 128 + 4 * lane;
  const uint32_t row = p.vector ? 0 : static_cast<uint32_t>(p.row0 + r);
  const int rank = p.kind == kLowrank && !p.vector ? p.rank : 0;
  float acc[4] = {};
  if (p.kind == kNormal) {
    for (int i = 0; i < p.pairs; ++i) {
      const float cs = __fmul_rn(__ldg(p.coef + i), p.scale);
      const Words4 v = noise_block(__ldg(p.key + i), col >> 3, row, p.tensor, kStreamNormal);
      const uint32_t a = col & 4 ? v.w[2] : v.w[0], b = col & 4 ? v.w[3] : v.w[1];
      EDGEES_UNROLL
      for (int j = 0; j < 4; ++j) {
        acc[j] = __fadd_rn(acc[j], __fmul_rn(cs, normal_at((j < 2 ? a : b) >> 16 * (j & 1))));
      }
    }
  } else {
    // Lane i makes the signs of pair (and rank) i of the next 32, all lanes use them in turn.
    const int each = rank ? rank : 1, all = p.pairs * each;
    int total[4] = {};
    Words4 own = {};
    float mine = 0.0f;
    for (int i = 0, k = 0; i < all; ++i) {
      if (i % kWarp == 0 && i + lane < all) {
        const int pair = (i + lane) / each;
        const uint32_t s = static_cast<uint32_t>((i + lane) % each);
        const uint64_t key = __ldg(p.key + pair);
        own = rank ? noise_block(key, piece, 0, p.tensor, kStreamRight + s)
                   : noise_block(key, piece, row, p.tensor, kStreamSign);
        if (rank && sign_at(key, row, 0, p.tensor, kStreamLeft + s)) {
          EDGEES_UNROLL
          for (int j = 0; j < 4; ++j) own.w[j] = ~own.w[j];
        }
        mine = __fmul_rn(__ldg(p.coef + pair), p.scale);
      }
      const int from = i % kWarp;
      Words4 v;
      EDGEES_UNROLL
      for (int j = 0; j < 4; ++j) v.w[j] = __shfl_sync(kAllLanes, own.w[j], from);
      const float cs = __shfl_sync(kAllLanes, mine, from);
      const uint32_t four = pick(v, lane >> 3) >> 4 * (lane & 7);
      if (each == 1) {
        EDGEES_UNROLL
        for (int j = 0; j < 4; ++j) acc[j] = __fadd_rn(acc[j], flip(cs, four >> j));
        continue;
      }
      EDGEES_UNROLL
      for (int j = 0; j < 4; ++j) total[j] += four >> j & 1 ? -1 : 1;
      if (++k < each) continue;
      k = 0;
      EDGEES_UNROLL
      for (int j = 0; j < 4; ++j) {
        acc[j] = __fadd_rn(acc[j], __fmul_rn(cs, static_cast<float>(total[j])));
        total[j] = 0;
      }
    }
  }
  float* d = p.delta + r * p.cols + col;
  EDGEES_UNROLL
  for (int j = 0; j < 4; ++j) {
    if (col + j < p.cols) d[j] = __fadd_rn(__fmul_rn(p.keep, d[j]), acc[j]);
  }
}

// A = keep * A, plus coef * left signs in the columns of the pairs' factors.
struct Factors {
  float* a;  // [rows][factors]
  int64_t rows;
  const uint64_t* key;  // [pairs]
  const uint32_t* slot;
  const float* coef;
  float keep, scale;
  int32_t factors, pairs, rank;
  uint32_t tensor;
};

EDGEES_DEVICE void factors_apply(const Factors& p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.rows * p.factors) return;
  const int64_t row = i / p.factors;
  const uint64_t factor = static_cast<uint64_t>(i % p.factors);
  float v = __fmul_rn(p.a[i], p.keep);
  for (int pair = 0; pair < p.pairs; ++pair) {
    const float cs = __fmul_rn(__ldg(p.coef + pair), p.scale);
    const uint64_t first = static_cast<uint64_t>(__ldg(p.slot + pair)) * p.rank;
    for (int k = 0; k < p.rank; ++k) {
      if ((first + k) % p.factors != factor) continue;
      v = __fadd_rn(v, flip(cs, sign_at(__ldg(p.key + pair), row, 0, p.tensor,
                                        kStreamLeft + static_cast<uint32_t>(k))));
    }
  }
  p.a[i] = v;
}

// Residual plane of rows row0.. : delta in steps of the cell, rounded with the run's dither.
struct Rounding {
  Weight w;            // the whole matrix; its plane is not read
  const float* delta;  // [rows][cols]
  uint8_t* out;        // [rows][ceil(cols / 32) * 4 * bits], aligned to 4 bytes
  uint64_t key;        // of the dither
  int64_t rows, row0;
  uint32_t tensor;
  int32_t bits;
};

EDGEES_DEVICE int dithered(float x, float u, int low, int high) {
  const float sum = __fadd_rn(x, u), least = static_cast<float>(low);
  const float raised = least < sum ? sum : least;  // NaN: low
  const float most = static_cast<float>(high);
  return static_cast<int>(floorf(raised < most ? raised : most));
}

// A thread to 32 columns of a row.
EDGEES_DEVICE void plane_encode(const Rounding& p) {
  const int64_t groups = (p.w.cols + 31) / 32;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.rows * groups) return;
  const int64_t r = i / groups, col = i % groups * 32;
  const int64_t row = p.row0 + r;
  const int low = -(1 << (p.bits - 1)), high = -low - 1;
  const int64_t flat = row * p.w.cols + col;
  const float s = step_of(p.w, has_codes(p.w.type) ? absmax_at(p.w, flat >> 6) : 0.0f);
  const float* d = p.delta + r * p.w.cols + col;
  uint32_t* out = reinterpret_cast<uint32_t*>(p.out) + i * p.bits;
  const int each = 4 * p.bits;  // bytes; byte b holds elements b, b + each, ...
  for (int word = 0; word < p.bits; ++word) {
    uint32_t packed = 0;
    for (int first = 4 * word; first < 32; first += each) {
      const Words4 v = noise_block(p.key, (col + first) >> 3, static_cast<uint32_t>(row), p.tensor,
                                   kStreamDither);
      const uint32_t a = first & 4 ? v.w[2] : v.w[0], b = first & 4 ? v.w[3] : v.w[1];
      EDGEES_UNROLL
      for (int j = 0; j < 4; ++j) {
        int q = 0;
        if (col + first + j < p.w.cols && s != 0.0f) {
          const float u = dither_value((j < 2 ? a : b) >> 16 * (j & 1) & 0xFFFFu);
          q = dithered(__fdiv_rn(d[first + j], s), u, low, high);
        }
        packed |= static_cast<uint32_t>(q - low) << (8 * j + p.bits * (first / each));
      }
    }
    out[word] = packed;
  }
}

}  // namespace edgees
