// Noise version 1 (design.md, section 2): which random bits belong to which weight.
//
// Philox counter words are (block, row, tensor, stream), seven rounds. A sign is one bit, 128 to a
// block, 1 meaning -1; a normal value or a dither is 16 bits, 8 to a block, low half first.
#pragma once
#include <stdint.h>

#include "normal_table.h"
#include "philox.h"

namespace edgees {

constexpr int kNoiseRounds = 7, kKeyRounds = 10;
constexpr uint32_t kKeyTag = 0x45444745u;  // third counter word of a key's own Philox

constexpr uint32_t kStreamSign = 0;        // dense signs
constexpr uint32_t kStreamLeft = 0x100;    // + k: left factor of lowrank noise
constexpr uint32_t kStreamRight = 0x200;   // + k: right factor
constexpr uint32_t kStreamNormal = 0x300;  // dense normals
constexpr uint32_t kStreamDither = 0x400;
constexpr uint32_t kStreamPool = 0x500;  // + k: right factors of the adapter view
constexpr int kMaxRank = 0x100;          // beyond it the streams of the factors would overlap

constexpr int64_t kMaxCols = int64_t{1} << 31;
constexpr int64_t kMaxRows = int64_t{1} << 32;  // a row is one counter word

EDGEES_HD constexpr int64_t sign_word_count(int64_t n) { return (n + 127) / 128 * 4; }
EDGEES_HD constexpr int64_t half_word_count(int64_t n) { return (n + 7) / 8 * 4; }

// True where element j is -1.
EDGEES_HD inline bool sign_bit(const uint32_t* words, int64_t j) {
  return (words[j >> 5] >> (j & 31)) & 1;
}
EDGEES_HD inline uint32_t half_word(const uint32_t* words, int64_t j) {
  return (words[j >> 1] >> (16 * (j & 1))) & 0xFFFFu;
}
// Integer of a 16-bit half-word: sign, 11 bits of table index, 4 bits between two entries.
EDGEES_HD inline int32_t normal_integer(const int32_t* table, uint32_t h) {
  const int32_t i = (h >> 4) & 0x7FF, f = h & 0xF;
  const int32_t m = table[i] + (((table[i + 1] - table[i]) * f) >> 4);
  return h >> 15 ? -m : m;
}
// Uniform in (0, 1), exact in float32.
EDGEES_HD inline float dither_value(uint32_t h) {
  return static_cast<float>(static_cast<int32_t>(2 * h + 1)) * (1.0f / 131072.0f);
}

#if !defined(__CUDACC_RTC__)  // the rest is for the host
// Whether kind, rank and shape make sense; a vector is row 0 alone.
bool noise_arguments(int kind, int rank, bool vector, int64_t row0, int64_t rows, int64_t cols);

// s: an element of eps is float(integer) * s, of variance 1. kind: EDGEES_NOISE_.
float noise_scale(int kind, int rank, bool vector);

// Packed signs of elements 0..n-1 of a row: sign_word_count(n) words.
void sign_words(uint64_t key, uint32_t row, uint32_t tensor, uint32_t stream, int64_t n,
                uint32_t* words);

// out[j] += amp * float(integer of element first+j) of the dense stream of `kind`: normals, or
// signs for the other kinds. amp holds the scale; first is a multiple of 128.
void add_dense(int kind, uint64_t key, uint32_t tensor, uint32_t row, int64_t first, int64_t n,
               float amp, float* out);

// out[j] += cs * float(sum_k a_signs[k] * (bit j of b_words[k] ? -1 : 1)); a_signs are +-1.
void add_lowrank_row(int rank, const uint32_t* const* b_words, const int* a_signs, float cs,
                     int64_t cols, float* out);

// row_out[j] += float(integer of eps[row][j]) * f32(c * scale), of any kind. Lowrank factors are
// made anew in each call: to walk many rows, keep them and call add_lowrank_row.
void add_eps_row(int kind, int rank, bool vector, uint64_t key, uint32_t tensor, int64_t row,
                 int64_t cols, float c, float* row_out);

// Dither of one canonical row: out[cols] in (0, 1).
void dither_row(uint64_t key, uint32_t tensor, uint32_t row, int64_t cols, float* out);
#endif

}  // namespace edgees
