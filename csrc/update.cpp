// The step: one generation's pairs added to the exact delta, or to the factors of an adapter.
#include <cstring>
#include <exception>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "noise.h"
#include "parallel.h"

namespace edgees {
namespace {

// A task is a patch of at most so many weights, a few KB of accumulator at a time. Every weight is
// computed alone, so how patches are cut changes no bit.
constexpr int64_t kPatch = 1 << 15, kTile = 2048;

int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Packed signs of elements first.. of one factor of each (pair, k), from the block of `first` on.
struct Factors {
  int rank;
  int64_t block, blocks;
  std::vector<uint32_t> words;

  Factors(int pairs, int rank, const uint64_t* keys, uint32_t tensor, uint32_t stream,
          int64_t first, int64_t n)
      : rank(rank), block(first / 128), blocks(parts(first + n, 128) - block) {
    words.resize(static_cast<size_t>(4 * blocks) * pairs * rank);
    parallel_for(static_cast<int64_t>(pairs) * rank, [&](int64_t i, int) {
      kernels().philox(keys[i / rank], 0, tensor, stream + static_cast<uint32_t>(i % rank),
                       static_cast<uint32_t>(block), blocks, words.data() + 4 * blocks * i);
    });
  }
  const uint32_t* at(int pair, int k) const {
    return words.data() + 4 * blocks * (static_cast<int64_t>(pair) * rank + k);
  }
};

}  // namespace
}  // namespace edgees

using namespace edgees;

extern "C" {

int edgees_delta_apply(float* delta, int64_t rows, int64_t cols, int64_t row0, uint32_t tensor,
                       int kind, int rank, int vector, int pairs, const uint64_t* keys,
                       const float* coefs, float keep) try {
  if (!noise_arguments(kind, rank, vector, row0, rows, cols) || pairs < 0 ||
      (pairs && (!keys || !coefs))) {
    return EDGEES_E_ARGUMENT;
  }
  if (rows == 0 || cols == 0) return 0;
  if (!delta) return EDGEES_E_ARGUMENT;
  const bool lowrank = kind == EDGEES_NOISE_LOWRANK && !vector;
  const float s = noise_scale(kind, rank, vector);
  const int factored = lowrank ? pairs : 0;
  const Factors a(factored, rank, keys, tensor, kStreamLeft, row0, rows);
  const Factors b(factored, rank, keys, tensor, kStreamRight, 0, cols);
  const int64_t wide = cols < kPatch ? cols : kPatch, tall = kPatch / wide;
  const int64_t across = parts(cols, wide);
  const auto patch = [&](int64_t i, int) {
    alignas(64) float acc[kTile];
    int sign[kMaxRank];
    const uint32_t* right[kMaxRank];
    const int64_t r0 = i / across * tall, c0 = i % across * wide;
    const int64_t r1 = r0 + tall < rows ? r0 + tall : rows;
    const int64_t c1 = c0 + wide < cols ? c0 + wide : cols;
    for (int64_t r = r0; r < r1; ++r) {
      for (int64_t c = c0; c < c1; c += kTile) {
        const int64_t n = c1 - c < kTile ? c1 - c : kTile;
        memset(acc, 0, static_cast<size_t>(n) * sizeof(float));
        for (int p = 0; p < pairs; ++p) {
          const float cs = coefs[p] * s;
          if (!lowrank) {
            add_dense(kind, keys[p], tensor, static_cast<uint32_t>(row0 + r), c, n, cs, acc);
            continue;
          }
          for (int k = 0; k < rank; ++k) {
            sign[k] = sign_bit(a.at(p, k), row0 % 128 + r) ? -1 : 1;
            right[k] = b.at(p, k) + c / 32;
          }
          add_lowrank_row(rank, right, sign, cs, n, acc);
        }
        kernels().decay_add(delta + r * cols + c, acc, n, keep);
      }
    }
  };
  parallel_for(parts(rows, tall) * across, patch);
  return 0;
} catch (const std::exception&) {
  return EDGEES_E_ARGUMENT;
}

int edgees_factors_apply(float* a, int64_t rows, int64_t factors, uint32_t tensor, int rank,
                         int pairs, const uint64_t* keys, const uint32_t* slots, const float* coefs,
                         float keep) try {
  if (!noise_arguments(EDGEES_NOISE_LOWRANK, rank, false, 0, rows, factors) || factors < 1 ||
      pairs < 0 || (pairs && (!keys || !slots || !coefs)) || (rows && !a)) {
    return EDGEES_E_ARGUMENT;
  }
  const float s = noise_scale(EDGEES_NOISE_LOWRANK, rank, false);
  const Factors left(pairs, rank, keys, tensor, kStreamLeft, 0, rows);
  const int64_t tall = 1024;
  parallel_for(parts(rows, tall), [&](int64_t i, int) {
    const int64_t r1 = (i + 1) * tall < rows ? (i + 1) * tall : rows;
    for (int64_t r = i * tall; r < r1; ++r) {
      float* row = a + r * factors;
      for (int64_t k = 0; k < factors; ++k) row[k] *= keep;
      for (int p = 0; p < pairs; ++p) {
        const float cs = coefs[p] * s;
        for (int j = 0; j < rank; ++j) {
          const uint64_t k = static_cast<uint64_t>(slots[p]) * rank + j;
          row[k % factors] += sign_bit(left.at(p, j), r) ? -cs : cs;
        }
      }
    }
  });
  return 0;
} catch (const std::exception&) {
  return EDGEES_E_ARGUMENT;
}
}
