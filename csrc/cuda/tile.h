// Products of many columns: tiles of weights are decoded and perturbed into shared memory as 16-bit
// numbers (x's own type; float32 where x is) in front of the matrix units; sums are floats. Dense
// noise takes one pass over the row per member that has columns in the tile, with the other columns
// zeroed, so callers put a member's columns side by side.
#pragma once
#include "gemv.h"

namespace edgees {

constexpr int kTileRows = 64, kTileDepth = 64, kTileThreads = 256;

template <class T, int Columns>
struct TileShared {
  static constexpr int stride = kTileDepth + 16 / sizeof(T);  // keeps fragments free of conflicts
  alignas(16) T x[Columns][stride];
  alignas(16) T w[kTileRows][stride];
  Table table;
  int32_t owner[Columns];
  bool first[Columns];  // no column before has the same owner
  float
      by[Columns];  // what a column's left signs are multiplied with, and those of the tile's rows
  uint32_t left[Columns][2];
};

// What is read one step ahead: a thread's part of x and of the codes.
template <int Pieces>
struct Ahead {
  uint4 x[Pieces];
  uint2 codes;
  float absmax;
};

template <class T, bool Brain>
EDGEES_DEVICE float number(T v) {
  return sizeof(T) == 4 ? static_cast<float>(v)
         : Brain        ? from_brain(static_cast<uint32_t>(v))
                        : from_half(static_cast<uint32_t>(v));
}

template <class T, bool Brain, int Columns>
struct Tile {
  static constexpr bool units = sizeof(T) == 2 && (!Brain || kBrainUnits);
  static constexpr int each = 16 / sizeof(T);       // numbers of 16 bytes
  static constexpr int across = kTileDepth / each;  // 16-byte pieces of a column
  static constexpr int pieces = Columns * across / kTileThreads;
  static constexpr int warps = Columns / 32;  // along the columns, 32 to a warp
  static constexpr int rows = kTileRows * warps / 8, eights = rows / 8;  // to a warp
  static constexpr int type = sizeof(T) == 4 ? kF32 : Brain ? kBF16 : kF16;
  using Shared = TileShared<T, Columns>;

  // 16 bytes of a column's k-th numbers, zeros where there are none.
  static EDGEES_DEVICE uint4 piece_of(const Product& p, int64_t column, int64_t k) {
    uint4 v = {0, 0, 0, 0};
    if (column >= p.n || k >= p.w.cols) return v;
    const int64_t at = column * p.x_stride + k;
    if (p.w.whole) return __ldg(static_cast<const uint4*>(p.x) + at / each);
    T part[each];
    EDGEES_UNROLL
    for (int i = 0; i < each; ++i) {
      part[i] = k + i < p.w.cols ? __ldg(static_cast<const T*>(p.x) + at + i) : T(0);
    }
    if (sizeof(T) == 4) {
      v.x = bits_of(static_cast<float>(part[0])), v.y = bits_of(static_cast<float>(part[1]));
      v.z = bits_of(static_cast<float>(part[2])), v.w = bits_of(static_cast<float>(part[3]));
    } else {
      const auto two = [&](int i) {
        return static_cast<uint32_t>(part[i % each]) | static_cast<uint32_t>(part[(i + 1) % each])
                                                           << 16;
      };
      v.x = two(0), v.y = two(2), v.z = two(4), v.w = two(6);
    }
    return v;
  }

  static EDGEES_DEVICE void read(const Product& p, const Shared& s, int64_t row, int64_t column0,
                                 int64_t k0, int thread, int32_t only, Ahead<pieces>& a) {
    EDGEES_UNROLL
    for (int i = 0; i < pieces; ++i) {
      const int at = thread + kTileThreads * i, column = at / across;
      if (only >= 0 && s.owner[column] != only) {
        a.x[i] = uint4{0, 0, 0, 0};
      } else {
        a.x[i] = piece_of(p, column0 + column, k0 + at % across * each);
      }
    }
    const int64_t col = k0 + 16 * (thread % 4);
    if (has_codes(p.w.type) && p.w.whole && row < p.w.rows && col < p.w.cols) {
      const int64_t flat = row * p.w.cols + col;
      a.codes = __ldg(static_cast<const uint2*>(p.w.base) + flat / 16);
      a.absmax = absmax_at(p.w, flat >> 6);
    }
  }

  // A thread's 16 weights, perturbed.
  static EDGEES_DEVICE void weights(const Product& p, const Table& table, int64_t row, int64_t col,
                                    const Ahead<pieces>& a, float strong, uint64_t key,
                                    uint32_t minus, float* w) {
    if (row >= p.w.rows || col >= p.w.cols) {
      EDGEES_UNROLL
      for (int i = 0; i < 16; ++i) w[i] = 0.0f;
      return;
    }
    if (!p.w.whole) {
      EDGEES_UNROLL
      for (int i = 0; i < 16; ++i) {
        w[i] = col + i < p.w.cols ? weight_at(p.w, table, row, col + i) : 0.0f;
      }
    } else {
      EDGEES_UNROLL
      for (int h = 0; h < 2; ++h) {
        if (has_codes(p.w.type)) {
          decode8(table, h ? a.codes.y : a.codes.x, a.absmax, w + 8 * h);
        } else {
          load8(p.w.base, row * p.w.cols + col + 8 * h, p.w.type, w + 8 * h);
        }
        if (p.w.bits) {
          move8(p.w, row, col / 32, static_cast<int>(col % 32 / 8) + h, step_of(p.w, a.absmax),
                w + 8 * h);
        }
      }
    }
    if (strong == 0.0f) return;
    if (p.e.kind == kSign) {
      EDGEES_UNROLL
      for (int i = 0; i < 16; ++i) w[i] += flip(strong, minus >> i);
    } else {
      EDGEES_UNROLL
      for (int h = 0; h < 2; ++h) {
        const Words4 v =
            noise_block(key, (col >> 3) + h, static_cast<uint32_t>(row), p.e.tensor, kStreamNormal);
        EDGEES_UNROLL
        for (int i = 0; i < 8; ++i) {
          w[8 * h + i] = fmaf(strong, normal_at(v.w[i / 2] >> 16 * (i & 1)), w[8 * h + i]);
        }
      }
    }
  }

  static EDGEES_DEVICE void write(const float* w, T* to) {
    uint4* out = reinterpret_cast<uint4*>(to);
    EDGEES_UNROLL
    for (int i = 0; i < 16 / each; ++i) {
      const float* v = w + each * i;
      if (sizeof(T) == 4) {
        out[i] = uint4{bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])};
      } else {
        out[i] =
            uint4{pack<Brain>(v[0], v[1]), pack<Brain>(v[2], v[3]),
                  pack<Brain>(v[4 % each], v[5 % each]), pack<Brain>(v[6 % each], v[7 % each])};
      }
    }
  }

  static EDGEES_DEVICE void multiply_tile(const Shared& s, int warp, int lane,
                                          float (&acc)[2][eights][4]) {
    const int column = warp % warps * 32 + lane / 4, row = warp / warps * rows;
    if constexpr (units) {
      const auto word = [](const T& at) { return *reinterpret_cast<const Word*>(&at); };
      EDGEES_UNROLL
      for (int k = 2 * (lane % 4); k < kTileDepth; k += 16) {
        uint32_t a[2][4];
        EDGEES_UNROLL
        for (int m = 0; m < 2; ++m) {
          EDGEES_UNROLL
          for (int i = 0; i < 4; ++i) {
            a[m][i] = word(s.x[column + 16 * m + 8 * (i & 1)][k + 4 * (i & 2)]);
          }
        }
        EDGEES_UNROLL
        for (int n = 0; n < eights; ++n) {
          const T* w = &s.w[row + 8 * n + lane / 4][k];
          const uint32_t b[2] = {word(w[0]), word(w[8])};
          EDGEES_UNROLL
          for (int m = 0; m < 2; ++m) multiply<Brain>(acc[m][n], a[m], b);
        }
      }
    } else {
      for (int k = 0; k < kTileDepth; ++k) {
        float x[4];
        EDGEES_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = number<T, Brain>(s.x[column + 8 * i][k]);
        EDGEES_UNROLL
        for (int n = 0; n < eights; ++n) {
          EDGEES_UNROLL
          for (int j = 0; j < 2; ++j) {
            const float w = number<T, Brain>(s.w[row + 8 * n + 2 * (lane % 4) + j][k]);
            EDGEES_UNROLL
            for (int i = 0; i < 4; ++i) {
              float& sum = acc[i / 2][n][i % 2 * 2 + j];
              sum = fmaf(x[i], w, sum);
            }
          }
        }
      }
    }
  }

  // Adds one member's (or everyone's: only < 0) columns.
  static EDGEES_DEVICE void pass(const Product& p, Shared& s, int64_t row0, int64_t column0,
                                 int thread, int32_t only, float (&acc)[2][eights][4]) {
    const int lane = thread % kWarp, quarter = thread % 4;
    const int64_t row = row0 + thread / 4;
    const float strong = only < 0 ? 0.0f : strength(p.e, only);
    const uint64_t key = strong == 0.0f ? 0 : __ldg(p.e.key + only);
    const bool signs = strong != 0.0f && p.e.kind == kSign;
    Words4 own = {};
    Ahead<pieces> ahead = {};
    read(p, s, row, column0, 0, thread, only, ahead);
    for (int64_t k0 = 0; k0 < p.w.cols; k0 += kTileDepth) {
      // A block of 128 signs is two steps long: four lanes make those of the next eight steps.
      uint32_t minus = 0;
      if (signs) {
        const int step = static_cast<int>(k0 / kTileDepth & 7);
        if (step == 0) {
          own = noise_block(key, k0 / 128 + quarter, static_cast<uint32_t>(row), p.e.tensor,
                            kStreamSign);
        }
        const int from = (lane & ~3) | step >> 1;
        const uint32_t a = __shfl_sync(kAllLanes, step & 1 ? own.w[2] : own.w[0], from);
        const uint32_t b = __shfl_sync(kAllLanes, step & 1 ? own.w[3] : own.w[1], from);
        minus = (quarter & 2 ? b : a) >> 16 * (quarter & 1);
      }
      float w[16];
      weights(p, s.table, row, k0 + 16 * quarter, ahead, strong, key, minus, w);
      __syncthreads();  // the tile before is used up
      write(w, &s.w[thread / 4][16 * quarter]);
      EDGEES_UNROLL
      for (int i = 0; i < pieces; ++i) {
        const int at = thread + kTileThreads * i;
        *reinterpret_cast<uint4*>(&s.x[at / across][at % across * each]) = ahead.x[i];
      }
      __syncthreads();
      if (k0 + kTileDepth < p.w.cols) {
        read(p, s, row, column0, k0 + kTileDepth, thread, only, ahead);
      }
      multiply_tile(s, thread / kWarp, lane, acc);
    }
  }

  static EDGEES_DEVICE void run(const Product& p) {
    EDGEES_SHARED(Shared, s);
    const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
    const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kTileRows;
    const int64_t column0 = static_cast<int64_t>(blockIdx.y) * Columns;
    fill(s.table, p.w.type, thread);
    if (thread < Columns) {
      s.owner[thread] =
          p.e.key && column0 + thread < p.n ? __ldg(p.e.owner + column0 + thread) : -1;
    }
    __syncthreads();
    if (thread < Columns) {
      bool first = s.owner[thread] >= 0;
      for (int c = 0; c < thread; ++c) first = first && s.owner[c] != s.owner[thread];
      s.first[thread] = first;
    }
    __syncthreads();

    float acc[2][eights][4] = {};
    const bool dense = p.e.key && p.e.kind != kLowrank;
    for (int c = 0; c < (dense ? Columns : 1); ++c) {
      if (!dense || s.first[c]) {
        pass(p, s, row0, column0, thread, dense ? s.owner[c] : -1, acc);
      }
    }

    const int column = warp % warps * 32 + lane / 4;
    const int row = warp / warps * rows + 2 * (lane % 4);
    if (p.e.factors) {
      for (int f = 0; f < p.e.factors; ++f) {
        float dot[4];
        EDGEES_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int64_t c = column0 + column + 8 * i;
          dot[i] = c < p.n ? __ldg(p.dots + c * p.e.factors + f) : 0.0f;
        }
        EDGEES_UNROLL
        for (int n = 0; n < eights; ++n) {
          EDGEES_UNROLL
          for (int j = 0; j < 2; ++j) {
            const int64_t r = row0 + row + 8 * n + j;
            const float a = r < p.w.rows ? __ldg(p.e.a + r * p.e.factors + f) : 0.0f;
            EDGEES_UNROLL
            for (int i = 0; i < 4; ++i) {
              float& y = acc[i / 2][n][i % 2 * 2 + j];
              y = fmaf(a, dot[i], y);
            }
          }
        }
      }
    }
    if (p.e.key && p.e.kind == kLowrank) {
      for (int k = 0; k < p.e.rank; ++k) {
        __syncthreads();
        if (thread < Columns) {
          const int32_t member = s.owner[thread];
          const float c = member < 0 ? 0.0f : strength(p.e, member);
          s.by[thread] = 0.0f;
          if (c != 0.0f) {
            const int at = p.e.factors ? pool_index(p.e, member, k) : k;
            const int64_t width = p.e.factors ? p.e.factors : p.e.rank;
            const Words4 v = noise_block(__ldg(p.e.key + member), row0 / 128, 0, p.e.tensor,
                                         kStreamLeft + static_cast<uint32_t>(k));
            s.by[thread] = c * p.dots[(column0 + thread) * width + at];
            s.left[thread][0] = row0 & 64 ? v.w[2] : v.w[0];
            s.left[thread][1] = row0 & 64 ? v.w[3] : v.w[1];
          }
        }
        __syncthreads();
        EDGEES_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int c = column + 8 * i;
          if (s.by[c] == 0.0f) continue;
          EDGEES_UNROLL
          for (int n = 0; n < eights; ++n) {
            EDGEES_UNROLL
            for (int j = 0; j < 2; ++j) {
              const int r = row + 8 * n + j;
              acc[i / 2][n][i % 2 * 2 + j] += flip(s.by[c], s.left[c][r >> 5] >> (r & 31));
            }
          }
        }
      }
    }
    EDGEES_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int64_t c = column0 + column + 8 * i;
      if (c >= p.n) continue;
      EDGEES_UNROLL
      for (int n = 0; n < eights; ++n) {
        EDGEES_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int64_t r = row0 + row + 8 * n + j;
          if (r < p.w.rows) store(p.y, c * p.y_stride + r, type, acc[i / 2][n][i % 2 * 2 + j]);
        }
      }
    }
  }
};

}  // namespace edgees
