// Block codecs and residual planes with one float vector type (simd.h).
#if defined(EDGEES_ARM_NEON)
using Half = PlainHalf;
#else
struct Half {
  EDGEES_METHOD float operator()(uint16_t h) const { return _cvtsh_ss(h); }
};
#endif

// A block's scales (and offsets): Block::scales, which compilers do not vectorise.
template <class Block>
EDGEES_INLINE void scales_of(const Block* b, float* s, float* o) {
#if !defined(EDGEES_ARM_NEON)
  if constexpr (std::is_same_v<Block, Q4_K> || std::is_same_v<Block, Q5_K>) {
    uint64_t scales, minima;
    k_parts(b->sc, &scales, &minima);
    const auto eight = [](uint64_t v, float by, float* out) {
      const __m256i all = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(v)));
      _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(all), _mm256_set1_ps(by)));
    };
    eight(scales, Half()(b->d), s);
    eight(minima, -Half()(b->dmin), o);
    return;
  }
#endif
  if constexpr (std::is_same_v<Block, Q6_K>) {
    const F by = set1(Half()(b->d));
    for (int j = 0; j < 16; j += L) store(s + j, mul(by, from_i8(b->sc + j)));
  } else {
    b->scales(Half(), s, o);
  }
}

template <bool OFFSET>
EDGEES_INLINE void affine(const int8_t* q, int n, float scale, float offset, float* out) {
  const F s = set1(scale);
  const F o = set1(offset);
  for (int i = 0; i < n; i += L) {
    const F v = mul(s, from_i8(q + i));
    store(out + i, OFFSET ? add(v, o) : v);
  }
}

#if defined(EDGEES_ARM_AVX512)
// Four-bit codes index a register of their sixteen values: the same products and sums, made once
// per group. A permutation reads only the low four bits of its index, so bytes need no masking.
EDGEES_INLINE F sixteen(int first) {
  const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(steps, _mm512_set1_epi32(first)));
}
EDGEES_INLINE __m512i widen(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
EDGEES_INLINE F low(__m512i bytes, F values) { return _mm512_permutexvar_ps(bytes, values); }
EDGEES_INLINE F high(__m512i bytes, F values) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}
EDGEES_INLINE F values_of(float scale, float offset, bool with_offset, int first) {
  const F v = mul(set1(scale), sixteen(first));
  return with_offset ? add(v, set1(offset)) : v;
}

template <class Block>
void decode_nibbles(const void* row, int64_t n, float* out) {
  const Block* b = static_cast<const Block*>(row);
  constexpr int groups = Block::weights / Block::group;
  for (int64_t i = 0; i < n; i += Block::weights, ++b) {
    float s[groups], o[groups] = {};
    scales_of(b, s, o);
    F v[groups];
    for (int g = 0; g < groups; ++g) v[g] = values_of(s[g], o[g], Block::offset, Block::lo);
    if (groups == 1) {  // 16 bytes: low nibbles are weights 0..15, high ones 16..31
      const __m512i bytes = widen(b->qs);
      store(out + i, low(bytes, v[0]));
      store(out + i + 16, high(bytes, v[0]));
    } else {  // 32 bytes: low nibbles are one group, high ones the next
      for (int g = 0; g < groups; g += 2)
        for (int h = 0; h < 32; h += 16) {
          const __m512i bytes = widen(b->qs + 16 * g + h);
          store(out + i + 32 * g + h, low(bytes, v[g]));
          store(out + i + 32 * g + 32 + h, high(bytes, v[g + 1]));
        }
    }
  }
}
#endif

template <class Block>
void decode_blocks(const void* row, int64_t n, float* out) {
  const Block* b = static_cast<const Block*>(row);
  constexpr int groups = Block::weights / Block::group;
  for (int64_t i = 0; i < n; i += Block::weights, ++b) {
    alignas(64) int8_t room[Block::weights];
    float s[groups], o[groups] = {};
    scales_of(b, s, o);
    const int8_t* q = b->unpack(room);
    for (int g = 0; g < groups; ++g) {
      affine<Block::offset>(q + g * Block::group, Block::group, s[g], o[g],
                            out + i + g * Block::group);
    }
  }
}

// A block's sixteen values are made once.
static void decode_table(int type, const void* row, int64_t n, float* out) {
  const Table4* b = static_cast<const Table4*>(row);
  const float* table = table_of(type);
  for (int64_t i = 0; i < n; i += Table4::weights, ++b) {
    float value[16];
    const F d = set1(b->d);
    for (int k = 0; k < 16; k += L) store(value + k, mul(load(table + k), d));
    for (int k = 0; k < 32; ++k) {
      out[i + 2 * k] = value[b->qs[k] >> 4];
      out[i + 2 * k + 1] = value[b->qs[k] & 15];
    }
  }
}

static void decode_half(const uint16_t* h, int64_t n, float* out) {
  int64_t i = 0;
#if defined(EDGEES_ARM_AVX512)
  for (; i + 16 <= n; i += 16) {
    _mm512_storeu_ps(out + i,
                     _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(h + i))));
  }
#elif defined(EDGEES_ARM_AVX2)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i))));
  }
#elif defined(EDGEES_ARM_NEON)
  for (; i + 4 <= n; i += 4) {
    vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + i))));
  }
#endif
  for (; i < n; ++i) out[i] = half_to_float(h[i]);
}

void decode(int type, const void* row, int64_t n, float* out) {
  if (with_format(type, [&](auto* block) {
        using Block = std::remove_pointer_t<decltype(block)>;
#if defined(EDGEES_ARM_AVX512)
        if constexpr (Block::hi - Block::lo == 15) {
          decode_nibbles<Block>(row, n, out);
          return;
        }
#endif
        decode_blocks<Block>(row, n, out);
      })) {
    return;
  }
  if (is_table(type)) return decode_table(type, row, n, out);
  const uint16_t* h = static_cast<const uint16_t*>(row);
  if (type == kTypeF32) {
    memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
  } else if (type == kTypeF16) {
    decode_half(h, n, out);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(h[i]) << 16);
  }
}

void cells(int type, const void* row, int64_t n, float float_cell, float* out) {
  const bool block = with_format(type, [&](auto* format) {
    using Block = std::remove_pointer_t<decltype(format)>;
    constexpr int groups = Block::weights / Block::group;
    const Block* b = static_cast<const Block*>(row);
    for (int64_t i = 0; i < n; i += Block::weights, ++b, out += groups) {
      float o[groups];
      scales_of(b, out, o);
      for (int g = 0; g < groups; ++g) out[g] = std::fabs(out[g]);
    }
  });
  if (block) return;
  if (is_table(type)) return table_cells(row, n, out);
  for (int64_t i = 0; i < n; i += kFloatGroup) *out++ = float_cell;
}

template <int BITS>
EDGEES_INLINE void add_plane_of(const uint8_t* plane, const float* step, int group, int64_t n,
                                float* w) {
  const F middle = set1(static_cast<float>(1 << (BITS - 1)));
  int64_t i = 0;
#if defined(EDGEES_ARM_AVX512)
  if constexpr (BITS == 4) {
    const int next = group == 16;
    for (; i + 32 <= n; i += 32, plane += 16) {
      const float* s = step + i / group;
      const __m512i bytes = widen(plane);
      const F a = mul(set1(s[0]), sixteen(-8)), b = next ? mul(set1(s[1]), sixteen(-8)) : a;
      store(w + i, add(load(w + i), low(bytes, a)));
      store(w + i + 16, add(load(w + i + 16), high(bytes, b)));
    }
  }
#endif
  for (; i + 32 <= n; i += 32, plane += 4 * BITS) {
    alignas(64) uint8_t q[32];
    unpack_plane(BITS, plane, q);
    const float* s = step + i / group;
    for (int k = 0; k < 32; k += L) {
      const F move = mul(set1(group == 16 ? s[k >> 4] : s[0]), sub(from_u8(q + k), middle));
      store(w + i + k, add(load(w + i + k), move));
    }
  }
  if (i < n) {
    uint8_t q[32];
    unpack_plane(BITS, plane, q);
    for (int k = 0; i < n; ++i, ++k) {
      const float move = step[i / group] * static_cast<float>(q[k] - (1 << (BITS - 1)));
      w[i] = w[i] + move;
    }
  }
}

void add_plane(int bits, const uint8_t* plane, const float* step, int group, int64_t n, float* w) {
  if (bits == 8) {
    add_plane_of<8>(plane, step, group, n, w);
  } else if (bits == 4) {
    add_plane_of<4>(plane, step, group, n, w);
  } else {
    add_plane_of<2>(plane, step, group, n, w);
  }
}
