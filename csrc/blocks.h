// GGUF block formats (ggml's ggml-common.h is the format's definition): w = scale * code + offset
// for each group of weights, codes signed where the format has no offset. Plain C++ that every arm
// inlines; `Half` converts a binary16 to float.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define EDGEES_INLINE static inline __attribute__((always_inline))
#define EDGEES_METHOD inline __attribute__((always_inline))

namespace edgees {

// Numbers of ggml_type.
enum Type {
  kTypeF32 = 0,
  kTypeF16 = 1,
  kTypeQ4_0 = 2,
  kTypeQ4_1 = 3,
  kTypeQ5_0 = 6,
  kTypeQ5_1 = 7,
  kTypeQ8_0 = 8,
  kTypeQ4_K = 12,
  kTypeQ5_K = 13,
  kTypeQ6_K = 14,
  kTypeBF16 = 30,
  // Ours, beyond ggml's: bitsandbytes' 4-bit types.
  kTypeNF4 = 100,
  kTypeFP4 = 101,
};

EDGEES_INLINE float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// binary16 -> binary32, exact, subnormals included.
EDGEES_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7FFFu;
  float magnitude;
  if (rest >= 0x7C00u) {
    magnitude = float_of(0x7F800000u | (rest & 0x3FFu) << 13);
  } else if (rest >= 0x0400u) {
    magnitude = float_of((rest << 13) + (112u << 23));
  } else {
    magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
  }
  uint32_t bits;
  memcpy(&bits, &magnitude, 4);
  return float_of(bits | sign);
}

// binary32 -> binary16, rounded to nearest even.
EDGEES_INLINE uint16_t half_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7FFFFFFFu;
  if (bits > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | (bits >> 13 & 0x1FFu));
  if (bits >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (bits < 0x38800000u) {  // subnormal: the rounding of an addition does it
    const float sum = float_of(bits) + 0.5f;
    memcpy(&bits, &sum, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
  }
  const uint32_t odd = bits >> 13 & 1;
  return static_cast<uint16_t>(sign | ((bits - (112u << 23) + 0xFFFu + odd) >> 13));
}

struct PlainHalf {
  EDGEES_METHOD float operator()(uint16_t h) const { return half_to_float(h); }
};

// Sixteen bytes as one value: byte pointers may alias, so compilers leave plain loops scalar.
using Bytes16 = uint8_t __attribute__((vector_size(16)));
using Words2 = uint64_t __attribute__((vector_size(16)));
using Bytes32 = uint8_t __attribute__((vector_size(32)));
EDGEES_INLINE void load_bytes(Bytes32& v, const uint8_t* p) { memcpy(&v, p, 32); }
EDGEES_INLINE void store_bytes(const Bytes32& v, int8_t* q) { memcpy(q, &v, 32); }

// Low nibbles of 16 bytes, then their high ones.
EDGEES_INLINE void split_nibbles(const uint8_t* b, int lo, void* q) {
  Bytes16 v;
  memcpy(&v, b, 16);
  const Bytes16 low = (v & 15) + static_cast<uint8_t>(lo);
  const Bytes16 high = (v >> 4) + static_cast<uint8_t>(lo);
  memcpy(q, &low, 16);
  memcpy(static_cast<uint8_t*>(q) + 16, &high, 16);
}
template <int LO>
EDGEES_INLINE void unpack_nibbles(const uint8_t* b, int8_t* q) {
  split_nibbles(b, LO, q);
}
template <int LO>
EDGEES_INLINE void pack_nibbles(const int8_t* q, uint8_t* b) {
  for (int i = 0; i < 16; ++i) {
    b[i] = static_cast<uint8_t>(((q[i] - LO) & 15) | ((q[i + 16] - LO) & 15) << 4);
  }
}
// The fifth bits of Q5_0 and Q5_1: bit i of a little-endian word belongs to weight i.
template <int LO>
EDGEES_INLINE void unpack_fifths(const uint8_t* h, const uint8_t* b, int8_t* q) {
  const Bytes16 place = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  Bytes16 v;
  memcpy(&v, b, 16);
  for (int k = 0; k < 2; ++k) {
    const uint8_t l = h[2 * k], u = h[2 * k + 1];
    const Bytes16 spread = {l, l, l, l, l, l, l, l, u, u, u, u, u, u, u, u};
    const Bytes16 fifth = reinterpret_cast<Bytes16>((spread & place) == place) & 16;
    const Bytes16 code = ((k ? v >> 4 : v & 15) | fifth) + static_cast<uint8_t>(LO);
    memcpy(q + 16 * k, &code, 16);
  }
}
template <int LO>
EDGEES_INLINE void pack_fifths(const int8_t* q, uint8_t* h, uint8_t* b) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>((q[i] - LO) >> 4 & 1) << i;
  memcpy(h, &bits, 4);
  pack_nibbles<LO>(q, b);
}

// Each format: weights per block, weights per group (one scale), range of the codes, whether there
// is an offset; scales() writes weights/group scales (and offsets); unpack() gives the codes, in q
// or in place.
struct Q4_0 {
  static constexpr int weights = 32, group = 32, lo = -8, hi = 7;
  static constexpr bool offset = false;
  uint16_t d;
  uint8_t qs[16];
  template <class Half>
  EDGEES_METHOD void scales(Half half, float* s, float*) const {
    s[0] = half(d);
  }
  EDGEES_METHOD const int8_t* unpack(int8_t* q) const {
    unpack_nibbles<-8>(qs, q);
    return q;
  }
  void pack(const int8_t* q) { pack_nibbles<-8>(q, qs); }
};
static_assert(sizeof(Q4_0) == 18, "Q4_0");

struct Q4_1 {
  static constexpr int weights = 32, group = 32, lo = 0, hi = 15;
  static constexpr bool offset = true;
  uint16_t d, m;
  uint8_t qs[16];
  template <class Half>
  EDGEES_METHOD void scales(Half half, float* s, float* o) const {
    s[0] = half(d);
    o[0] = half(m);
  }
  EDGEES_METHOD const int8_t* unpack(int8_t* q) const {
    unpack_nibbles<0>(qs, q);
    return q;
  }
  void pack(const int8_t* q) { pack_nibbles<0>(q, qs); }
};
static_assert(sizeof(Q4_1) == 20, "Q4_1");

struct Q5_0 {
  static constexpr int weights = 32, group = 32, lo = -16, hi = 15;
  static constexpr bool offset = false;
  uint16_t d;
  uint8_t qh[4], qs[16];
  template <class Half>
  EDGEES_METHOD void scales(Half half, float* s, float*) const {
    s[0] = half(d);
  }
  EDGEES_METHOD const int8_t* unpack(int8_t* q) const {
    unpack_fifths<-16>(qh, qs, q);
    return q;
  }
  void pack(const int8_t* q) { pack_fifths<-16>(q, qh, qs); }
};
static_assert(sizeof(Q5_0) == 22, "Q5_0");

struct Q5_1 {
  static constexpr int weights = 32, group = 32, lo = 0, hi = 31;
  static constexpr bool offset = true;
  uint16_t d, m;
  uint8_t qh[4], qs[16];
  template <class Half>
  EDGEES_METHOD void scales(Half half, float* s, float* o) const {
    s[0] = half(d);
    o[0] = half(m);
  }
  EDGEES_METHOD const int8_t* unpack(int8_t* q) const {
    unpack_fifths<0>(qh, qs, q);
    return q;
  }
  void pack(const int8_t* q) { pack_fifths<0>(q, qh, qs); }
};
static_assert(sizeof(Q5_1) == 24, "Q5_1");

struct Q8_0 {
  static constexpr int weights = 32, group = 32, lo = -128, hi = 127;
  static constexpr bool offset = false;
  uint16_t d;
  int8_t qs[32];
  template <class Half>
  EDGEES_METHOD void scales(Half half, float* s, float*) const {
    s[0] = half(d);
  }
  EDGEES_METHOD const int8_t* unpack(int8_t*) const { return qs; }
  void pack(const int8_t* q) { memcpy(qs, q, 32); }
};
static_assert(sizeof(Q8_0) == 34, "Q8_0");

// Eight 6-bit scales and eight 6-bit minima of a Q4_K or Q5_K block, in 12 bytes: as bytes.
EDGEES_INLINE void k_parts(const uint8_t* p, uint64_t* scales, uint64_t* minima) {
  uint32_t w[3];
  memcpy(w, p, 12);
  constexpr uint32_t kLow6 = 0x3F3F3F3Fu, kLow4 = 0x0F0F0F0Fu, kTop2 = 0x30303030u;
  *scales = (w[0] & kLow6) | uint64_t{(w[2] & kLow4) | (w[0] >> 2 & kTop2)} << 32;
  *minima = (w[1] & kLow6) | uint64_t{(w[2] >> 4 & kLow4) | (w[1] >> 2 & kTop2)} << 32;
}
template <class Half>
EDGEES_INLINE void k_scales(Half half, uint16_t d, uint16_t dmin, const uint8_t* p, float* s,
                            float* o) {
  const float df = half(d), mf = -half(dmin);
  uint64_t scales, minima;
  k_parts(p, &scales, &minima);
  for (int j = 0; j < 8; ++j) {
    s[j] = df * static_cast<float>(scales >> (8 * j) & 63);
    o[j] = mf * static_cast<float>(minima >> (8 * j) & 63);
  }
}

struct Q4_K {
  static constexpr int weights = 256, group = 32, lo = 0, hi = 15;
  static constexpr bool offset = true;
  uint16_t d, dmin;
  uint8_t sc[12], qs[128];
  template <class Half>
  EDGEES_METHOD void scales(Half half, float* s, float* o) const {
    k_scales(half, d, dmin, sc, s, o);
  }
  EDGEES_METHOD const int8_t* unpack(int8_t* q) const {
    for (int c = 0; c < 4; ++c) {
      Bytes32 v;
      load_bytes(v, qs + 32 * c);
      store_bytes(v & 15, q + 64 * c);
      store_bytes(v >> 4, q + 64 * c + 32);
    }
    return q;
  }
  void pack(const int8_t* q) {
    for (int c = 0; c < 4; ++c)
      for (int i = 0; i < 32; ++i)
        qs[32 * c + i] =
            static_cast<uint8_t>((q[64 * c + i] & 15) | (q[64 * c + 32 + i] & 15) << 4);
  }
};
static_assert(sizeof(Q4_K) == 144, "Q4_K");

struct Q5_K {
  static constexpr int weights = 256, group = 32, lo = 0, hi = 31;
  static constexpr bool offset = true;
  uint16_t d, dmin;
  uint8_t sc[12], qh[32], qs[128];
  template <class Half>
  EDGEES_METHOD void scales(Half half, float* s, float* o) const {
    k_scales(half, d, dmin, sc, s, o);
  }
  EDGEES_METHOD const int8_t* unpack(int8_t* q) const {
    Bytes32 v, h;
    load_bytes(h, qh);
    for (int c = 0; c < 4; ++c, h >>= 2) {
      load_bytes(v, qs + 32 * c);
      store_bytes((v & 15) | (h & 1) << 4, q + 64 * c);
      store_bytes(v >> 4 | (h & 2) << 3, q + 64 * c + 32);
    }
    return q;
  }
  void pack(const int8_t* q) {
    memset(qh, 0, sizeof qh);
    for (int c = 0; c < 4; ++c)
      for (int i = 0; i < 32; ++i) {
        const int a = q[64 * c + i], b = q[64 * c + 32 + i];
        qs[32 * c + i] = static_cast<uint8_t>((a & 15) | (b & 15) << 4);
        qh[i] = static_cast<uint8_t>(qh[i] | (a >> 4 & 1) << (2 * c) | (b >> 4 & 1) << (2 * c + 1));
      }
  }
};
static_assert(sizeof(Q5_K) == 176, "Q5_K");

struct Q6_K {
  static constexpr int weights = 256, group = 16, lo = -32, hi = 31;
  static constexpr bool offset = false;
  uint8_t ql[128], qh[64];
  int8_t sc[16];
  uint16_t d;
  template <class Half>
  EDGEES_METHOD void scales(Half half, float* s, float*) const {
    const float df = half(d);
    for (int j = 0; j < 16; ++j) s[j] = df * static_cast<float>(sc[j]);
  }
  EDGEES_METHOD const int8_t* unpack(int8_t* q) const {
    for (int k = 0; k < 2; ++k, q += 128) {
      Bytes32 a, b, h;
      load_bytes(a, ql + 64 * k);
      load_bytes(b, ql + 64 * k + 32);
      load_bytes(h, qh + 32 * k);
      store_bytes(((a & 15) | (h & 3) << 4) - 32, q);
      store_bytes(((b & 15) | (h & 12) << 2) - 32, q + 32);
      store_bytes((a >> 4 | (h & 48)) - 32, q + 64);
      store_bytes((b >> 4 | (h >> 6) << 4) - 32, q + 96);
    }
    return q - 256;
  }
  void pack(const int8_t* q) {
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < 32; ++i) {
        const int8_t* o = q + 128 * h;
        const int a = o[i] + 32, b = o[i + 32] + 32, c = o[i + 64] + 32, e = o[i + 96] + 32;
        ql[64 * h + i] = static_cast<uint8_t>((a & 15) | (c & 15) << 4);
        ql[64 * h + 32 + i] = static_cast<uint8_t>((b & 15) | (e & 15) << 4);
        qh[32 * h + i] = static_cast<uint8_t>(a >> 4 | b >> 4 << 2 | c >> 4 << 4 | e >> 4 << 6);
      }
  }
};
static_assert(sizeof(Q6_K) == 210, "Q6_K");

// Calls f(Format*) with a null pointer of the block type's struct; false for other types.
template <class Function>
EDGEES_INLINE bool with_format(int type, Function f) {
  switch (type) {
    case kTypeQ4_0:
      f(static_cast<Q4_0*>(nullptr));
      return true;
    case kTypeQ4_1:
      f(static_cast<Q4_1*>(nullptr));
      return true;
    case kTypeQ5_0:
      f(static_cast<Q5_0*>(nullptr));
      return true;
    case kTypeQ5_1:
      f(static_cast<Q5_1*>(nullptr));
      return true;
    case kTypeQ8_0:
      f(static_cast<Q8_0*>(nullptr));
      return true;
    case kTypeQ4_K:
      f(static_cast<Q4_K*>(nullptr));
      return true;
    case kTypeQ5_K:
      f(static_cast<Q5_K*>(nullptr));
      return true;
    case kTypeQ6_K:
      f(static_cast<Q6_K*>(nullptr));
      return true;
    default:
      return false;
  }
}

// bitsandbytes' 4-bit types (QLoRA, arXiv 2305.14314, appendix E): w = value[code] * absmax for
// blocks of 64. Here a block has its absmax in front of its codes, of which the high nibble comes
// first.
struct Table4 {
  static constexpr int weights = 64, group = 32;
  float d;
  uint8_t qs[32];
};
static_assert(sizeof(Table4) == 36, "NF4 and FP4");

constexpr float kNF4[16] = {-1.0f,
                            -0.6961928009986877f,
                            -0.5250730514526367f,
                            -0.39491748809814453f,
                            -0.28444138169288635f,
                            -0.18477343022823334f,
                            -0.09105003625154495f,
                            0.0f,
                            0.07958029955625534f,
                            0.16093020141124725f,
                            0.24611230194568634f,
                            0.33791524171829224f,
                            0.44070982933044434f,
                            0.5626170039176941f,
                            0.7229568362236023f,
                            1.0f};
constexpr float kFP4[16] = {0.0f,       0.0625f / 12, 8.0f / 12,  1.0f,          4.0f / 12,  0.5f,
                            2.0f / 12,  0.25f,        0.0f,       -0.0625f / 12, -8.0f / 12, -1.0f,
                            -4.0f / 12, -0.5f,        -2.0f / 12, -0.25f};
EDGEES_INLINE const float* table_of(int type) { return type == kTypeNF4 ? kNF4 : kFP4; }
EDGEES_INLINE bool is_table(int type) { return type == kTypeNF4 || type == kTypeFP4; }

EDGEES_INLINE void table_cells(const void* row, int64_t n, float* out) {
  const Table4* b = static_cast<const Table4*>(row);
  for (int64_t i = 0; i < n; i += Table4::group) {
    *out++ = std::fabs(b[i / Table4::weights].d) * 0.125f;
  }
}

// Integer products take the values in 2^-11 of absmax, and a residual plane's cell is absmax / 8.
constexpr int kTableBits = 11, kTableCellBits = 3;
constexpr int table_level(float v) {
  return static_cast<int>(v * (1 << kTableBits) + (v < 0 ? -0.5f : 0.5f));
}
#define EDGEES_LEVELS(t)                                                           \
  {table_level(t[0]),  table_level(t[1]),  table_level(t[2]),  table_level(t[3]),  \
   table_level(t[4]),  table_level(t[5]),  table_level(t[6]),  table_level(t[7]),  \
   table_level(t[8]),  table_level(t[9]),  table_level(t[10]), table_level(t[11]), \
   table_level(t[12]), table_level(t[13]), table_level(t[14]), table_level(t[15])}
constexpr int16_t kNF4Levels[16] = EDGEES_LEVELS(kNF4), kFP4Levels[16] = EDGEES_LEVELS(kFP4);
#undef EDGEES_LEVELS
EDGEES_INLINE const int16_t* levels_of(int type) {
  return type == kTypeNF4 ? kNF4Levels : kFP4Levels;
}

constexpr int kFloatGroup = 32;  // weights that share a cell in float types

EDGEES_INLINE bool is_float(int type) {
  return type == kTypeF32 || type == kTypeF16 || type == kTypeBF16;
}

// Bytes of a packed residual plane row, whole groups of 32.
EDGEES_INLINE int64_t plane_bytes(int bits, int64_t cols) { return (cols + 31) / 32 * 4 * bits; }

// Codes of 32 weights of a plane, 0..2^bits-1.
EDGEES_INLINE void unpack_plane(int bits, const uint8_t* p, uint8_t* q) {
  if (bits == 8) {
    memcpy(q, p, 32);
  } else if (bits == 4) {
    split_nibbles(p, 0, q);
  } else {
    uint64_t v;
    memcpy(&v, p, 8);
    constexpr uint64_t kThree = 0x0303030303030303u;
    for (int k = 0; k < 4; k += 2) {  // written 16 bytes at a time, as they are read
      const Words2 pair = {v >> (2 * k) & kThree, v >> (2 * k + 2) & kThree};
      memcpy(q + 8 * k, &pair, 16);
    }
  }
}

// Canonical (Hugging Face) row of a file row: llama.cpp stores a head's rows interleaved.
EDGEES_INLINE int64_t canonical_row(int64_t row, int64_t rows, int heads) {
  if (!heads) return row;
  const int64_t hd = rows / heads, h = row / hd, k = row % hd;
  return h * hd + (k & 1) * (hd / 2) + k / 2;
}

// blocks.cpp
int64_t row_bytes(int type, int64_t cols);  // < 0: EDGEES_E_
int cell_group(int type);                   // < 0: EDGEES_E_TYPE

// Effective rows of the full views: decode, then add the plane (bits 0: none). scratch: cols/16+1.
struct Plane {
  int bits;
  int span;
  float float_cell;
};
void decode_row(int type, const void* base, int64_t cols, const Plane& plane, const uint8_t* codes,
                float* scratch, float* out);

}  // namespace edgees
