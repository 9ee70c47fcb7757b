// Products of a few columns: y[c][row] = sum_j w[row][j] x[c][j], float sums, the noise of column
// c's member added to the weights in registers. Four rows to a warp, 32 weights of each to a lane;
// the warps of a block that have the same rows share out the row's length. A column's sum is made
// in one order that depends on the shape alone.
#pragma once
#include "weights.h"

namespace edgees {

struct Product {
  Weight w;
  Noise e;
  const void* x;  // [n][x_stride], numbers of type x_type
  void* y;        // [n][y_stride], the same type
  float* dots;    // [n][factors, or rank]: made by `dots` for lowrank noise and factors
  int64_t n, x_stride, y_stride;
  int32_t x_type;
};

constexpr int kRowsOfWarp = 4, kSplits = 8;  // most warps that share four rows

// Eight weights of each row; the type is known outside, so that all loads are under way at once.
template <int Type>
EDGEES_DEVICE void load_rows(const void* base, const int64_t (&flat)[kRowsOfWarp], int piece,
                             float (&w)[kRowsOfWarp][8]) {
  EDGEES_UNROLL
  for (int r = 0; r < kRowsOfWarp; ++r) load8(base, flat[r] + 8 * piece, Type, w[r]);
}

// Words of the dense signs of four rows for this lane's 32 columns: each lane of four makes the
// block of 128 signs of one row, then they exchange words.
EDGEES_DEVICE void sign_words4(uint64_t key, uint32_t tensor, int64_t row, int64_t col, int lane,
                               uint32_t* out) {
  const Words4 own =
      noise_block(key, col >> 7, static_cast<uint32_t>(row + (lane & 3)), tensor, kStreamSign);
  uint32_t a = own.w[0], b = own.w[1], c = own.w[2], d = own.w[3];
  const bool two = lane & 2, one = lane & 1;
  const uint32_t p = __shfl_xor_sync(kAllLanes, two ? a : c, 2);
  const uint32_t q = __shfl_xor_sync(kAllLanes, two ? b : d, 2);
  if (two) {
    a = p, b = q;
  } else {
    c = p, d = q;
  }
  const uint32_t r = __shfl_xor_sync(kAllLanes, one ? a : b, 1);
  const uint32_t s = __shfl_xor_sync(kAllLanes, one ? c : d, 1);
  out[0] = one ? r : a;
  out[1] = one ? b : r;
  out[2] = one ? s : c;
  out[3] = one ? d : s;
}

// The adapter and the lowrank noise on top of one output, and its place.
EDGEES_DEVICE void finish(const Product& p, int64_t row, int64_t column, float y) {
  if (p.e.factors) {
    const float* a = p.e.a + row * p.e.factors;
    const float* dots = p.dots + column * p.e.factors;
    float sum = 0.0f;
    for (int f = 0; f < p.e.factors; ++f) sum = fmaf(__ldg(a + f), dots[f], sum);
    y += sum;
  }
  if (p.e.kind == kLowrank && p.e.key) {
    const int32_t member = p.e.owner[column];
    const float c = strength(p.e, member);
    if (c != 0.0f) {
      const int64_t width = p.e.factors ? p.e.factors : p.e.rank;
      y = lowrank_output(p.e, member, c, p.dots + column * width, row, y);
    }
  }
  store(p.y, column * p.y_stride + row, p.x_type, y);
}

template <int N>
struct Partial {
  float of[kSplits][4][kRowsOfWarp * N];  // [split][warp of those with other rows][row, column]
};

// blockDim: (32, groups of four rows, splits of their length); gridDim: (rows, columns) / what
// fits. Kind: the dense noise, or -1.
template <bool Codes, int Kind, int N>
EDGEES_DEVICE void gemv(const Product& p) {
  constexpr int kValues = kRowsOfWarp * N;
  EDGEES_SHARED(Table, table);
  EDGEES_SHARED(Partial<N>, partial);
  const int lane = threadIdx.x, group = threadIdx.y, split = threadIdx.z;
  const int splits = blockDim.z;
  fill(table, p.w.type, lane + kWarp * (group + static_cast<int>(blockDim.y) * split));
  __syncthreads();

  const int64_t row0 = (static_cast<int64_t>(blockIdx.x) * blockDim.y + group) * kRowsOfWarp;
  const int64_t column0 = static_cast<int64_t>(blockIdx.y) * N;
  float acc[kValues] = {};  // [row][column]
  int32_t member[N];
  float strong[N];
  EDGEES_UNROLL
  for (int c = 0; c < N; ++c) {
    const bool there = Kind >= 0 && column0 + c < p.n;
    member[c] = there ? p.e.owner[column0 + c] : -1;
    strong[c] = there ? strength(p.e, member[c]) : 0.0f;
  }

  for (int64_t first = static_cast<int64_t>(split) * 1024; first < p.w.cols;
       first += static_cast<int64_t>(splits) * 1024) {
    const int64_t col = first + 32 * lane;
    const bool inside = col < p.w.cols;  // lanes beyond still take part in exchanges
    uint4 codes[kRowsOfWarp];
    float absmax[kRowsOfWarp], step[kRowsOfWarp];
    int64_t flat[kRowsOfWarp];
    EDGEES_UNROLL
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int64_t row = row0 + r < p.w.rows ? row0 + r : p.w.rows - 1;
      flat[r] = inside ? row * p.w.cols + col : 0;
      if (Codes) {
        codes[r] = __ldg(static_cast<const uint4*>(p.w.base) + flat[r] / 32);
        absmax[r] = absmax_at(p.w, flat[r] >> 6);
      }
      step[r] = p.w.bits ? step_of(p.w, Codes ? absmax[r] : 0.0f) : 0.0f;
    }
    uint32_t minus[Kind == kSign ? N : 1][kRowsOfWarp];
    if (Kind == kSign) {
      EDGEES_UNROLL
      for (int c = 0; c < N; ++c) {
        if (strong[c] == 0.0f) continue;  // the same for all lanes
        if (c && member[c] == member[c - 1]) {
          EDGEES_UNROLL
          for (int r = 0; r < kRowsOfWarp; ++r) minus[c][r] = minus[c ? c - 1 : 0][r];
        } else {
          sign_words4(__ldg(p.e.key + member[c]), p.e.tensor, row0, col, lane, minus[c]);
        }
      }
    }
    if (!inside) continue;
    EDGEES_UNROLL_IF(N == 1, 4)  // more would not fit the instruction cache
    for (int piece = 0; piece < 4; ++piece) {
      float w[kRowsOfWarp][8];
      if (Codes) {
        EDGEES_UNROLL
        for (int r = 0; r < kRowsOfWarp; ++r) {
          const Words4 q = {{codes[r].x, codes[r].y, codes[r].z, codes[r].w}};
          decode8(table, pick(q, piece), absmax[r], w[r]);
        }
      } else {
        if (p.w.type == kF32) {
          load_rows<kF32>(p.w.base, flat, piece, w);
        } else if (p.w.type == kF16) {
          load_rows<kF16>(p.w.base, flat, piece, w);
        } else {
          load_rows<kBF16>(p.w.base, flat, piece, w);
        }
      }
      if (p.w.bits) {
        EDGEES_UNROLL
        for (int r = 0; r < kRowsOfWarp; ++r) {
          const int64_t row = row0 + r < p.w.rows ? row0 + r : p.w.rows - 1;
          move8(p.w, row, col / 32, piece, step[r], w[r]);
        }
      }
      EDGEES_UNROLL
      for (int c = 0; c < N; ++c) {
        if (column0 + c >= p.n) break;
        float x[8];
        load8(p.x, (column0 + c) * p.x_stride + col + 8 * piece, p.x_type, x);
        if (Kind == kSign && strong[c] != 0.0f) {
          EDGEES_UNROLL
          for (int r = 0; r < kRowsOfWarp; ++r) {
            const uint32_t eight = minus[Kind == kSign ? c : 0][r] >> 8 * piece;
            EDGEES_UNROLL
            for (int k = 0; k < 8; ++k) {
              const float e = flip(strong[c], eight >> k);
              acc[r * N + c] = fmaf(w[r][k] + e, x[k], acc[r * N + c]);
            }
          }
        } else if (Kind == kNormal && strong[c] != 0.0f) {
          const uint64_t key = __ldg(p.e.key + member[c]);
          EDGEES_UNROLL
          for (int r = 0; r < kRowsOfWarp; ++r) {
            const Words4 v = noise_block(key, (col >> 3) + piece, static_cast<uint32_t>(row0 + r),
                                         p.e.tensor, kStreamNormal);
            EDGEES_UNROLL
            for (int k = 0; k < 8; ++k) {
              const float e = normal_at(v.w[k / 2] >> 16 * (k & 1));
              acc[r * N + c] = fmaf(fmaf(strong[c], e, w[r][k]), x[k], acc[r * N + c]);
            }
          }
        } else {
          EDGEES_UNROLL
          for (int r = 0; r < kRowsOfWarp; ++r) {
            EDGEES_UNROLL
            for (int k = 0; k < 8; ++k) acc[r * N + c] = fmaf(w[r][k], x[k], acc[r * N + c]);
          }
        }
      }
    }
  }

  warp_sums(acc, lane);
  constexpr int kHeld = kValues > kWarp ? kValues / kWarp : 1;
  const int at = summed_at<kValues>(lane);
  // where there are fewer values than lanes, several lanes hold the same one
  const bool speaks = kValues >= kWarp || lane % (kWarp / (kValues < kWarp ? kValues : kWarp)) == 0;
  if (splits > 1) {
    if (speaks) {
      EDGEES_UNROLL
      for (int i = 0; i < kHeld; ++i) partial.of[split][group][at + i] = acc[i];
    }
    __syncthreads();
    if (split) return;
  }
  if (!speaks) return;
  EDGEES_UNROLL
  for (int i = 0; i < kHeld; ++i) {
    float y = acc[i];
    for (int s = 1; s < splits; ++s) y += partial.of[s][group][at + i];
    const int64_t row = row0 + (at + i) / N, column = column0 + (at + i) % N;
    if (row < p.w.rows && column < p.n) finish(p, row, column, y);
  }
}

// Any shape, alignment and kind, one weight at a time: a warp to a row, up to N columns.
template <int N>
EDGEES_DEVICE void gemv_any(const Product& p) {
  EDGEES_SHARED(Table, table);
  const int lane = threadIdx.x;
  fill(table, p.w.type, lane + kWarp * static_cast<int>(threadIdx.y));
  __syncthreads();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t column0 = static_cast<int64_t>(blockIdx.y) * N;
  if (row >= p.w.rows) return;  // a warp as a whole
  const bool dense = p.e.key && p.e.kind != kLowrank;
  float acc[N] = {};
  for (int64_t col = lane; col < p.w.cols; col += kWarp) {
    const float w = weight_at(p.w, table, row, col);
    int32_t before = -1;
    float e = 0.0f;
    EDGEES_UNROLL
    for (int c = 0; c < N; ++c) {
      if (column0 + c >= p.n) break;
      float v = w;
      if (dense) {
        const int32_t member = p.e.owner[column0 + c];
        const float strong = strength(p.e, member);
        if (strong != 0.0f) {
          if (member != before) {
            e = dense_at(p.e.kind, __ldg(p.e.key + member), p.e.tensor, static_cast<uint32_t>(row),
                         col);
            before = member;
          }
          v = fmaf(strong, e, v);
        }
      }
      acc[c] = fmaf(v, load(p.x, (column0 + c) * p.x_stride + col, p.x_type), acc[c]);
    }
  }
  warp_sums(acc, lane);
  const int at = summed_at<N>(lane);
  if (lane % (kWarp / N)) return;
  if (column0 + at < p.n) finish(p, row, column0 + at, acc[0]);
}

// dots[c][k] = right factor k of column c's member, or factor k of the pool, times x[c]: a block
// each, gridDim (columns, k).
struct Sums {
  float of[8];
};
EDGEES_DEVICE void dots(const Product& p) {
  EDGEES_SHARED(Sums, sums);
  const int64_t column = blockIdx.x, k = blockIdx.y;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int64_t words = sign_word_count(p.w.cols);
  const uint64_t key = p.e.factors || !p.e.key ? 0 : __ldg(p.e.key + p.e.owner[column]);
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i * 32 < p.w.cols; i += blockDim.x) {
    const uint32_t minus =
        p.e.factors
            ? __ldg(p.e.pool + k * words + i)
            : pick(noise_block(key, i >> 2, 0, p.e.tensor, kStreamRight + static_cast<uint32_t>(k)),
                   static_cast<int>(i & 3));
    const int64_t at = column * p.x_stride + i * 32;
    if (p.w.whole) {
      EDGEES_UNROLL
      for (int piece = 0; piece < 4; ++piece) {
        float x[8];
        load8(p.x, at + 8 * piece, p.x_type, x);
        EDGEES_UNROLL
        for (int j = 0; j < 8; ++j) sum += flip(x[j], minus >> (8 * piece + j));
      }
    } else {
      const int64_t left = p.w.cols - i * 32;
      for (int j = 0; j < 32 && j < left; ++j) {
        sum += flip(load(p.x, at + j, p.x_type), minus >> j);
      }
    }
  }
  float all[1] = {sum};
  warp_sums(all, lane);
  if (lane == 0) sums.of[warp] = all[0];
  __syncthreads();
  if (threadIdx.x) return;
  float total = sums.of[0];
  for (int w = 1; w < warps; ++w) total += sums.of[w];
  p.dots[column * gridDim.y + k] = total;
}

}  // namespace edgees
