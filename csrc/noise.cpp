#include "noise.h"

#include <cmath>
#include <cstring>

#include "api.h"
#include "kernels.h"

namespace edgees {
namespace {

constexpr int64_t kChunk = 1024;  // elements whose words or sums sit in a stack buffer

bool known(int kind, int rank) {
  return kind == EDGEES_NOISE_SIGN || kind == EDGEES_NOISE_NORMAL ||
         (kind == EDGEES_NOISE_LOWRANK && rank >= 1 && rank <= kMaxRank);
}

bool shape(int64_t row0, int64_t rows, int64_t cols) {
  return row0 >= 0 && rows >= 0 && row0 <= kMaxRows && rows <= kMaxRows - row0 && cols >= 0 &&
         cols <= kMaxCols;
}

}  // namespace

bool noise_arguments(int kind, int rank, bool vector, int64_t row0, int64_t rows, int64_t cols) {
  return known(kind, rank) && shape(row0, rows, cols) && (!vector || (row0 == 0 && rows == 1));
}

float noise_scale(int kind, int rank, bool vector) {
  if (kind == EDGEES_NOISE_NORMAL) return kNormalScale;
  if (kind == EDGEES_NOISE_SIGN || vector) return 1.0f;
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(rank)));
}

void sign_words(uint64_t key, uint32_t row, uint32_t tensor, uint32_t stream, int64_t n,
                uint32_t* words) {
  kernels().philox(key, row, tensor, stream, 0, (n + 127) / 128, words);
}

void add_dense(int kind, uint64_t key, uint32_t tensor, uint32_t row, int64_t first, int64_t n,
               float amp, float* out) {
  const Kernels& k = kernels();
  const bool normal = kind == EDGEES_NOISE_NORMAL;
  const uint32_t stream = normal ? kStreamNormal : kStreamSign;
  const int64_t per = normal ? 8 : 128, chunk = normal ? kChunk : 16 * kChunk;
  alignas(64) uint32_t words[kChunk / 2];
  for (int64_t j = 0; j < n; j += chunk) {
    const int64_t m = n - j < chunk ? n - j : chunk;
    k.philox(key, row, tensor, stream, static_cast<uint32_t>((first + j) / per),
             (m + per - 1) / per, words);
    (normal ? k.add_normals : k.add_signs)(out + j, m, words, amp);
  }
}

void add_lowrank_row(int rank, const uint32_t* const* b_words, const int* a_signs, float cs,
                     int64_t cols, float* out) {
  const Kernels& k = kernels();
  if (rank == 1) return k.add_signs(out, cols, b_words[0], a_signs[0] < 0 ? -cs : cs);
  // The integer sum is formed in float, where it is exact; cs*sum + out is then decay_add.
  alignas(64) float total[kChunk];
  for (int64_t j = 0; j < cols; j += kChunk) {
    const int64_t m = cols - j < kChunk ? cols - j : kChunk;
    memset(total, 0, static_cast<size_t>(m) * sizeof(float));
    for (int i = 0; i < rank; ++i) {
      k.add_signs(total, m, b_words[i] + j / 32, static_cast<float>(a_signs[i]));
    }
    k.decay_add(total, out + j, m, cs);
    memcpy(out + j, total, static_cast<size_t>(m) * sizeof(float));
  }
}

void add_eps_row(int kind, int rank, bool vector, uint64_t key, uint32_t tensor, int64_t row,
                 int64_t cols, float c, float* row_out) {
  const float cs = c * noise_scale(kind, rank, vector);
  if (vector || kind != EDGEES_NOISE_LOWRANK) {
    const uint32_t r = vector ? 0 : static_cast<uint32_t>(row);
    return add_dense(kind, key, tensor, r, 0, cols, cs, row_out);
  }
  int a[kMaxRank];
  const uint32_t* b[kMaxRank];
  uint32_t words[kMaxRank][4];  // one Philox block of each right factor at a time
  for (int i = 0; i < rank; ++i) {
    kernels().philox(key, 0, tensor, kStreamLeft + i, static_cast<uint32_t>(row / 128), 1,
                     words[i]);
    a[i] = sign_bit(words[i], row % 128) ? -1 : 1;
    b[i] = words[i];
  }
  for (int64_t j = 0; j < cols; j += 128) {
    for (int i = 0; i < rank; ++i) {
      kernels().philox(key, 0, tensor, kStreamRight + i, static_cast<uint32_t>(j / 128), 1,
                       words[i]);
    }
    add_lowrank_row(rank, b, a, cs, cols - j < 128 ? cols - j : 128, row_out + j);
  }
}

void dither_row(uint64_t key, uint32_t tensor, uint32_t row, int64_t cols, float* out) {
  alignas(64) uint32_t words[kChunk / 2];
  for (int64_t j = 0; j < cols; j += kChunk) {
    const int64_t m = cols - j < kChunk ? cols - j : kChunk;
    kernels().philox(key, row, tensor, kStreamDither, static_cast<uint32_t>(j / 8), (m + 7) / 8,
                     words);
    uint16_t half[kChunk];  // words are little-endian: the low half comes first
    memcpy(half, words, static_cast<size_t>(half_word_count(m)) * sizeof(uint32_t));
    for (int64_t i = 0; i < m; ++i) out[j + i] = dither_value(half[i]);
  }
}

}  // namespace edgees

using namespace edgees;

extern "C" {

uint64_t edgees_key(uint64_t seed, uint32_t generation, uint32_t pair) {
  const Words4 r = philox4x32<kKeyRounds>(seed, generation, pair, kKeyTag, 1);
  return r.w[0] | static_cast<uint64_t>(r.w[1]) << 32;
}

int edgees_philox(uint64_t key, uint32_t row, uint32_t tensor, uint32_t stream, uint32_t first,
                  int64_t blocks, uint32_t* out) {
  if (blocks < 0 || blocks > kMaxRows - first || (blocks && !out)) return EDGEES_E_ARGUMENT;
  kernels().philox(key, row, tensor, stream, first, blocks, out);
  return 0;
}

int edgees_eps(int kind, int rank, int vector, uint64_t key, uint32_t tensor, int64_t row0,
               int64_t rows, int64_t cols, float* out) {
  if (!noise_arguments(kind, rank, vector, row0, rows, cols)) return EDGEES_E_ARGUMENT;
  if (rows == 0 || cols == 0) return 0;
  if (!out) return EDGEES_E_ARGUMENT;
  for (int64_t r = 0; r < rows; ++r, out += cols) {
    memset(out, 0, static_cast<size_t>(cols) * sizeof(float));
    add_eps_row(kind, rank, vector, key, tensor, row0 + r, cols, 1.0f, out);
  }
  return 0;
}

int edgees_sign_vector(uint64_t key, uint32_t tensor, uint32_t stream, int64_t n, float* out) {
  if (n < 0 || n > kMaxRows || (n && !out)) return EDGEES_E_ARGUMENT;
  uint32_t words[kChunk / 32];
  for (int64_t j = 0; j < n; j += kChunk) {
    const int64_t m = n - j < kChunk ? n - j : kChunk;
    kernels().philox(key, 0, tensor, stream, static_cast<uint32_t>(j / 128), (m + 127) / 128,
                     words);
    for (int64_t i = 0; i < m; ++i) out[j + i] = sign_bit(words, i) ? -1.0f : 1.0f;
  }
  return 0;
}

int edgees_dither(uint64_t key, uint32_t tensor, int64_t row0, int64_t rows, int64_t cols,
                  float* out) {
  if (!shape(row0, rows, cols) || (rows && cols && !out)) return EDGEES_E_ARGUMENT;
  for (int64_t r = 0; r < rows; ++r) {
    dither_row(key, tensor, static_cast<uint32_t>(row0 + r), cols, out + r * cols);
  }
  return 0;
}
}
