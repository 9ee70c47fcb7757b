// What is learned, on top of the base's codes: residual planes (the refined view) and codes moved
// on the base's own lattice. Rounding is by a dither fixed for the run: floor(x + u).
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "blocks.h"
#include "kernels.h"
#include "noise.h"
#include "parallel.h"

namespace edgees {
namespace {

int floor_to_int(float v) {
  const int i = static_cast<int>(v);
  return i - (v < static_cast<float>(i));
}

// clamp(floor(x + u), low, high); NaN gives low.
int dithered(float x, float u, int low, int high) {
  const float raised = std::max(static_cast<float>(low), x + u);
  return floor_to_int(std::min(static_cast<float>(high), raised));
}

void pack_plane(int bits, const uint8_t* q, uint8_t* p) {
  if (bits == 8) {
    std::copy(q, q + 32, p);
  } else if (bits == 4) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
  } else {
    for (int i = 0; i < 8; ++i) {
      p[i] = static_cast<uint8_t>(q[i] | q[i + 8] << 2 | q[i + 16] << 4 | q[i + 24] << 6);
    }
  }
}

struct Scratch {
  std::vector<float> cells, dither;
  float* cells_of(int64_t cols) {
    cells.resize(static_cast<size_t>(cols / 16 + 1));
    return cells.data();
  }
  float* dither_of(uint64_t key, uint32_t tensor, int32_t row, int64_t cols) {
    dither.resize(static_cast<size_t>(cols));
    dither_row(key, tensor, static_cast<uint32_t>(row), cols, dither.data());
    return dither.data();
  }
};
thread_local Scratch scratch;

template <class Block>
void move_codes(const Block* from, int64_t cols, const float* delta, const float* u, Block* to) {
  constexpr int groups = Block::weights / Block::group;
  for (int64_t i = 0; i < cols; i += Block::weights, ++from, ++to) {
    int8_t q[Block::weights];
    float s[groups], o[groups];
    from->scales(PlainHalf(), s, o);
    const int8_t* codes = from->unpack(q);
    if (codes != q) std::copy(codes, codes + Block::weights, q);
    for (int k = 0; k < Block::weights; ++k) {
      const float scale = s[k / Block::group], cell = std::fabs(scale);
      if (cell == 0.0f) continue;
      // in steps of the weight's value: a negative scale counts its codes downwards
      const int steps = dithered(delta[i + k] / cell, u[i + k], -512, 512);
      const int code = q[k] + (scale < 0 ? -steps : steps);
      q[k] = static_cast<int8_t>(std::min(std::max(code, Block::lo), Block::hi));
    }
    *to = *from;
    to->pack(q);
  }
}

}  // namespace
}  // namespace edgees

using namespace edgees;

extern "C" {

int64_t edgees_plane_row_bytes(int bits, int64_t cols) {
  if ((bits != 2 && bits != 4 && bits != 8) || cols <= 0) return EDGEES_E_ARGUMENT;
  return plane_bytes(bits, cols);
}

int edgees_plane_count(int type, const void* base, int64_t rows, int64_t cols, const float* delta,
                       float cell_rho, int64_t* counts) {
  const int64_t width = row_bytes(type, cols);
  if (width < 0) return static_cast<int>(width);
  const int group = cell_group(type);
  const int64_t chunk = rows_per_task(cols), tasks = (rows + chunk - 1) / chunk;
  std::vector<int64_t> part(static_cast<size_t>(tasks) * 9, 0);
  parallel_for(tasks, [&](int64_t task, int) {
    float* cell = scratch.cells_of(cols);
    int64_t* n = &part[static_cast<size_t>(task) * 9];
    const int64_t end = std::min(rows, (task + 1) * chunk);
    for (int64_t r = task * chunk; r < end; ++r) {
      kernels().cells(type, static_cast<const uint8_t*>(base) + r * width, cols, cell_rho, cell);
      const float* d = delta + r * cols;
      for (int64_t g = 0, j = 0; j < cols; ++g) {
        const int64_t stop = std::min(cols, j + group);
        if (cell[g] == 0.0f) {
          j = stop;
          continue;
        }
        float largest = 0.0f;
        for (int64_t i = j; i < stop; ++i) largest = std::max(largest, std::fabs(d[i]));
        for (int e = 0; e < 9; ++e) {
          const float limit = std::ldexp(cell[g], e - 1);
          if (largest <= limit) break;
          for (int64_t i = j; i < stop; ++i) n[e] += std::fabs(d[i]) > limit;
        }
        j = stop;
      }
    }
  });
  for (int64_t i = 0; i < tasks * 9; ++i) counts[i % 9] += part[static_cast<size_t>(i)];
  return 0;
}

int edgees_plane_encode(int type, const void* base, int64_t rows, int64_t cols, const float* delta,
                        const int32_t* canonical, uint64_t dither_key, uint32_t tensor, int bits,
                        int span, float cell_rho, uint8_t* plane) {
  const int64_t width = row_bytes(type, cols);
  if (width < 0) return static_cast<int>(width);
  if ((bits != 2 && bits != 4 && bits != 8) || span < 0 || span > 8) return EDGEES_E_ARGUMENT;
  const int group = cell_group(type);
  const int64_t stride = plane_bytes(bits, cols);
  const int low = -(1 << (bits - 1)), high = (1 << (bits - 1)) - 1;
  const float part = std::ldexp(1.0f, span - bits);
  each_row(rows, cols, [&](int64_t r) {
    float* step = scratch.cells_of(cols);
    kernels().cells(type, static_cast<const uint8_t*>(base) + r * width, cols, cell_rho, step);
    const float* u = scratch.dither_of(dither_key, tensor, canonical[r], cols);
    const float* d = delta + r * cols;
    uint8_t* out = plane + r * stride;
    for (int64_t i = 0; i < cols; i += 32, out += 4 * bits) {
      uint8_t q[32];
      std::fill(q, q + 32, static_cast<uint8_t>(-low));
      const int64_t n = std::min<int64_t>(32, cols - i);
      for (int64_t k0 = 0; k0 < n; k0 += group) {
        const float s = step[(i + k0) / group] * part;
        if (s == 0.0f) continue;
        const int64_t stop = std::min<int64_t>(n, k0 + group);
        for (int64_t k = k0; k < stop; ++k) {
          q[k] = static_cast<uint8_t>(dithered(d[i + k] / s, u[i + k], low, high) - low);
        }
      }
      pack_plane(bits, q, out);
    }
  });
  return 0;
}

int edgees_lattice_encode(int type, const void* base, int64_t rows, int64_t cols,
                          const float* delta, const int32_t* canonical, uint64_t dither_key,
                          uint32_t tensor, void* out) {
  const int64_t width = row_bytes(type, cols);
  if (width < 0) return static_cast<int>(width);
  const bool block = with_format(type, [&](auto* format) {
    using Block = std::remove_pointer_t<decltype(format)>;
    each_row(rows, cols, [&](int64_t r) {
      const float* u = scratch.dither_of(dither_key, tensor, canonical[r], cols);
      move_codes(reinterpret_cast<const Block*>(static_cast<const uint8_t*>(base) + r * width),
                 cols, delta + r * cols, u,
                 reinterpret_cast<Block*>(static_cast<uint8_t*>(out) + r * width));
    });
  });
  return block ? 0 : EDGEES_E_TYPE;
}
}
