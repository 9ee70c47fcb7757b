// Products in 16-bit integers, for the vector arms; scalar_integer.inl says what they compute.
static void quantize(const float* x, int64_t n, int16_t* q, float* scale, float* sum) {
  for (int64_t i = 0; i < n; i += kGroup, ++scale, ++sum) {
#if defined(EDGEES_ARM_AVX512)
    const __m512 a = load(x + i), b = load(x + i + 16);
    const __m512i mask = _mm512_set1_epi32(INT32_MAX);
    const uint32_t top = static_cast<uint32_t>(
        _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), mask),
                                                 _mm512_and_si512(_mm512_castps_si512(b), mask))));
#elif defined(EDGEES_ARM_AVX2)
    const __m256i mask = _mm256_set1_epi32(INT32_MAX);
    __m256i most = _mm256_setzero_si256();
    for (int k = 0; k < kGroup; k += L)
      most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(load(x + i + k)), mask));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    const uint32_t top = static_cast<uint32_t>(_mm_cvtsi128_si32(m));
#elif defined(EDGEES_ARM_NEON)
    uint32x4_t most = vdupq_n_u32(0);
    for (int k = 0; k < kGroup; k += L)
      most = vmaxq_u32(most,
                       vandq_u32(vreinterpretq_u32_f32(load(x + i + k)), vdupq_n_u32(0x7FFFFFFFu)));
    const uint32_t top = vmaxvq_u32(most);
#endif
    float inverse;
    scale[0] = step_of(top, &inverse);
    const F by = set1(inverse);
    int32_t total = 0;
#if defined(EDGEES_ARM_AVX512)
    const __m512i qa = _mm512_cvtps_epi32(mul(a, by)), qb = _mm512_cvtps_epi32(mul(b, by));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), _mm512_cvtepi32_epi16(qa));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i + 16), _mm512_cvtepi32_epi16(qb));
    total = _mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb));
#elif defined(EDGEES_ARM_AVX2)
    __m256i all = _mm256_setzero_si256();
    for (int k = 0; k < kGroup; k += 16) {
      const __m256i qa = _mm256_cvtps_epi32(mul(load(x + i + k), by));
      const __m256i qb = _mm256_cvtps_epi32(mul(load(x + i + k + 8), by));
      all = _mm256_add_epi32(all, _mm256_add_epi32(qa, qb));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i + k),
                          _mm256_permute4x64_epi64(_mm256_packs_epi32(qa, qb), 0xD8));
    }
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4E));
    total = _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xB1)));
#elif defined(EDGEES_ARM_NEON)
    int32x4_t all = vdupq_n_s32(0);
    for (int k = 0; k < kGroup; k += L) {
      const int32x4_t v = vcvtnq_s32_f32(mul(load(x + i + k), by));
      all = vaddq_s32(all, v);
      vst1_s16(q + i + k, vmovn_s32(v));
    }
    total = vaddvq_s32(all);
#endif
    sum[0] = scale[0] * static_cast<float>(total);
  }
}

static void interleave(const int16_t* q, int64_t ld, int columns, int64_t n, int16_t* panel) {
#if defined(EDGEES_ARM_NEON)
  for (int64_t i = 0; i < n; i += 2, panel += 2 * L)
    for (int c = 0; c < L; ++c)
      for (int k = 0; k < 2; ++k) panel[k * L + c] = c < columns ? q[c * ld + i + k] : int16_t{0};
#else
  const int32_t* from = reinterpret_cast<const int32_t*>(q);
  alignas(64) int32_t lanes[L];
  for (int c = 0; c < L; ++c) lanes[c] = static_cast<int32_t>(c * (ld / 2));
#if defined(EDGEES_ARM_AVX512)
  const __m512i at = _mm512_load_si512(lanes);
  const __mmask16 some = static_cast<__mmask16>((1u << columns) - 1);
  for (int64_t i = 0; i < n / 2; ++i, panel += 2 * L)
    _mm512_storeu_si512(panel, _mm512_mask_i32gather_epi32(zero_i(), some, at, from + i, 4));
#else
  alignas(32) int32_t some[L];
  for (int c = 0; c < L; ++c) some[c] = c < columns ? -1 : 0;
  const __m256i at = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes));
  const __m256i mask = _mm256_load_si256(reinterpret_cast<const __m256i*>(some));
  for (int64_t i = 0; i < n / 2; ++i, panel += 2 * L)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel),
                        _mm256_mask_i32gather_epi32(zero_i(), from + i, at, mask, 4));
#endif
#endif
}

// Codes and steps of 16 weights to 2^bits code + by step + add.
#if defined(EDGEES_ARM_NEON)
using Bytes = uint8x16_t;
static inline Bytes bytes(const void* p) { return vld1q_u8(static_cast<const uint8_t*>(p)); }
static inline Bytes low_nibbles(Bytes b) { return vandq_u8(b, vdupq_n_u8(15)); }
static inline Bytes high_nibbles(Bytes b) { return vshrq_n_u8(b, 4); }
static inline Bytes add_bytes(Bytes b, int lo) {
  return vaddq_u8(b, vdupq_n_u8(static_cast<uint8_t>(lo)));
}
template <int BITS>
static inline void join(Bytes code, Bytes step, int16_t by, int16_t add, int16_t* q) {
  const int8x16_t c = vreinterpretq_s8_u8(code);
  int16x8_t a = vmovl_s8(vget_low_s8(c)), b = vmovl_s8(vget_high_s8(c));
  if (BITS) {
    const int16x8_t s = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(step)));
    const int16x8_t t = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(step)));
    const int16x8_t more = vdupq_n_s16(add);
    a = vaddq_s16(vmlaq_n_s16(vshlq_n_s16(a, BITS), s, by), more);
    b = vaddq_s16(vmlaq_n_s16(vshlq_n_s16(b, BITS), t, by), more);
  }
  vst1q_s16(q, a);
  vst1q_s16(q + 8, b);
}
#else
using Bytes = __m128i;
static inline Bytes bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
static inline Bytes low_nibbles(Bytes b) { return _mm_and_si128(b, _mm_set1_epi8(15)); }
static inline Bytes high_nibbles(Bytes b) {
  return _mm_and_si128(_mm_srli_epi16(b, 4), _mm_set1_epi8(15));
}
static inline Bytes add_bytes(Bytes b, int lo) {
  return _mm_add_epi8(b, _mm_set1_epi8(static_cast<char>(lo)));
}
template <int BITS>
static inline void join(Bytes code, Bytes step, int16_t by, int16_t add, int16_t* q) {
  __m256i v = _mm256_cvtepi8_epi16(code);
  if (BITS) {
    const __m256i move = _mm256_mullo_epi16(_mm256_cvtepu8_epi16(step), _mm256_set1_epi16(by));
    v = _mm256_add_epi16(_mm256_slli_epi16(v, BITS),
                         _mm256_add_epi16(move, _mm256_set1_epi16(add)));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), v);
}
#endif

#if !defined(EDGEES_ARM_AVX512)
template <class Block, int BITS>
static void codes_of(const void* row, int64_t n, int span, const uint8_t* plane, int16_t* q,
                     float* scale, float* offset, int64_t stride) {
  const Block* b = static_cast<const Block*>(row);
  constexpr int groups = Block::weights / Block::group;
  constexpr bool nibbles = Block::weights == 32 && Block::hi - Block::lo == 15;
  constexpr int middle = BITS ? 1 << (BITS - 1) : 0;
  const float part = power_of_two(-BITS);
  for (int64_t i = 0; i < n; i += Block::weights, ++b) {
    float s[groups], o[groups] = {};
    b->scales(Half(), s, o);
    for (int g = 0; g < groups; ++g, scale += stride, offset += stride) {
      *scale = s[g] * part;
      if (Block::offset) *offset = o[g];
    }
    alignas(64) int8_t room[Block::weights];
    const int8_t* c = room;
    if constexpr (!nibbles) c = b->unpack(room);
    for (int k = 0; k < Block::weights; k += 32) {
      Bytes code[2], step[2] = {};
      if constexpr (nibbles) {
        const Bytes both = bytes(b->qs);
        code[0] = low_nibbles(both);
        code[1] = high_nibbles(both);
        if (Block::lo)
          for (Bytes& v : code) v = add_bytes(v, Block::lo);
      } else {
        code[0] = bytes(c + k);
        code[1] = bytes(c + k + 16);
      }
      if constexpr (BITS == 4) {
        const Bytes both = bytes(plane);
        step[0] = low_nibbles(both);
        step[1] = high_nibbles(both);
      } else if constexpr (BITS == 8) {
        step[0] = bytes(plane);
        step[1] = bytes(plane + 16);
      } else if constexpr (BITS == 2) {
        alignas(16) uint8_t all[32];
        unpack_plane(2, plane, all);
        step[0] = bytes(all);
        step[1] = bytes(all + 16);
      }
      plane += BITS * 4;
      for (int h = 0; h < 2; ++h) {
        const float by = s[(k + 16 * h) / Block::group];
        int32_t sign;  // all ones where the scale is negative; a branch would be guessed wrong
        memcpy(&sign, &by, 4);
        sign >>= 31;
        const int16_t up = static_cast<int16_t>(((1 << span) ^ sign) - sign);
        join<BITS>(code[h], step[h], up, static_cast<int16_t>(-middle * up), q + i + k + 16 * h);
      }
    }
  }
}

#else
// Sixteen bytes as 32 nibbles: the low ones, then the high ones.
static inline __m256i nibbles_of(const uint8_t* p) {
  const __m256i down = _mm256_set_m128i(_mm_set1_epi16(4), _mm_setzero_si128());
  const __m256i both = _mm256_broadcastsi128_si256(bytes(p));
  return _mm256_and_si256(_mm256_srlv_epi16(both, down), _mm256_set1_epi8(15));
}
static inline __m256i bytes_32(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// Blocks of 32 four-bit codes with four-bit steps: code and step side by side in bytes, then one
// multiplication of both. span at most 6.
template <class Block>
static void nibble_codes(const Block* b, int64_t n, int span, const uint8_t* plane, int16_t* q,
                         float* scale, float* offset, int64_t stride) {
  const __m128 part = _mm_setr_ps(power_of_two(-4), 1, 1, 1);
  const __m512i down = _mm512_inserti64x4(zero_i(), _mm256_set1_epi16(4), 1);
  const __m512i low = _mm512_set1_epi8(15);
  __m512i by[2], add[2];  // for scales above and below zero
  for (int k = 0; k < 2; ++k) {
    const int step = k ? -(1 << span) : 1 << span;
    by[k] = _mm512_set1_epi16(static_cast<int16_t>(16 | (step & 255) << 8));
    add[k] = _mm512_set1_epi16(static_cast<int16_t>(16 * Block::lo - 8 * step));
  }
  for (int64_t i = 0; i < n; i += 32, ++b, plane += 16, scale += stride, offset += stride) {
    const __m128 head =
        _mm_mul_ps(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(b))), part);
    _mm_store_ss(scale, head);
    if (Block::offset) _mm_store_ss(offset, _mm_movehdup_ps(head));
    const __m128i c = bytes(b->qs), p = bytes(plane);
    const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(c, p), _mm_unpacklo_epi8(c, p));
    const __m512i pairs =
        _mm512_and_si512(_mm512_srlv_epi16(_mm512_broadcast_i64x4(both), down), low);
    _mm_prefetch(reinterpret_cast<const char*>(b) + 1024, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(plane) + 1024, _MM_HINT_T0);
    const int minus = b->d >> 15;
    _mm512_storeu_si512(q + i,
                        _mm512_add_epi16(_mm512_maddubs_epi16(pairs, by[minus]), add[minus]));
  }
}

// The same for 32 weights at a time.
template <class Block, int BITS>
static void codes_of(const void* row, int64_t n, int span, const uint8_t* plane, int16_t* q,
                     float* scale, float* offset, int64_t stride) {
  const Block* b = static_cast<const Block*>(row);
  constexpr int groups = Block::weights / Block::group;
  constexpr bool nibbles = Block::weights == 32 && Block::hi - Block::lo == 15;
  constexpr bool two = Block::group == 16;  // scales in 32 weights
  if constexpr (nibbles && BITS == 4) {
    if (span <= 6) return nibble_codes(b, n, span, plane, q, scale, offset, stride);
  }
  const __m128 part = _mm_setr_ps(power_of_two(-BITS), 1, 1, 1);
  const __m128i up = _mm_cvtsi32_si128(span);
  const __m512i middle = _mm512_set1_epi16(static_cast<int16_t>(BITS ? 1 << (BITS - 1) : 0));
  for (int64_t i = 0; i < n; i += Block::weights, ++b) {
    float s[groups], o[groups];
    if constexpr (Block::weights == 32) {  // the scale, and perhaps the offset, lead the block
      const __m128 head =
          _mm_mul_ps(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(b))), part);
      _mm_store_ss(scale, head);
      if (Block::offset) _mm_store_ss(offset, _mm_movehdup_ps(head));
      scale += stride;
      offset += stride;
    } else {
      b->scales(Half(), s, o);
      for (int g = 0; g < groups; ++g, scale += stride, offset += stride) {
        *scale = s[g] * power_of_two(-BITS);
        if (Block::offset) *offset = o[g];
      }
    }
    alignas(64) int8_t room[Block::weights];
    const int8_t* c = room;
    if constexpr (!nibbles && !std::is_same_v<Block, Q4_K>) c = b->unpack(room);
    for (int k = 0; k < Block::weights; k += 32, plane += 4 * BITS) {
      __m512i v;
      if constexpr (nibbles) {
        v = _mm512_cvtepu8_epi16(nibbles_of(b->qs));
        if (Block::lo) v = _mm512_add_epi16(v, _mm512_set1_epi16(Block::lo));
      } else if constexpr (std::is_same_v<Block, Q4_K>) {  // 32 bytes: one group low, the next high
        const __m256i two_groups = bytes_32(b->qs + k / 64 * 32);
        v = _mm512_cvtepu8_epi16(_mm256_and_si256(
            _mm256_srl_epi16(two_groups, _mm_cvtsi32_si128(k & 32 ? 4 : 0)), _mm256_set1_epi8(15)));
      } else {
        v = _mm512_cvtepi8_epi16(bytes_32(c + k));
      }
      if constexpr (BITS != 0) {
        __m256i step;
        if constexpr (BITS == 4) {
          step = nibbles_of(plane);
        } else if constexpr (BITS == 8) {
          step = bytes_32(plane);
        } else {
          alignas(32) uint8_t all[32];
          unpack_plane(2, plane, all);
          step = bytes_32(all);
        }
        __m512i move = _mm512_sll_epi16(_mm512_sub_epi16(_mm512_cvtepu8_epi16(step), middle), up);
        __m512i minus;  // ones where the scale is negative
        if constexpr (Block::weights == 32) {
          int16_t d;
          memcpy(&d, b, 2);
          minus = _mm512_srai_epi16(_mm512_set1_epi16(d), 15);
        } else {
          int32_t bits[2];
          memcpy(bits, s + k / Block::group, two ? 8 : 4);
          minus =
              two ? _mm512_mask_set1_epi32(_mm512_set1_epi32(bits[0] >> 31), 0xFF00, bits[1] >> 31)
                  : _mm512_set1_epi32(bits[0] >> 31);
        }
        move = _mm512_sub_epi16(_mm512_xor_si512(move, minus), minus);
        v = _mm512_add_epi16(_mm512_slli_epi16(v, BITS), move);
      }
      _mm512_storeu_si512(q + i + k, v);
    }
  }
}
#endif

static bool codes(int type, const void* row, int64_t n, int bits, int span, const uint8_t* plane,
                  int16_t* q, float* scale, float* offset, int64_t stride) {
  return with_format(type, [&](auto* format) {
    using Block = std::remove_pointer_t<decltype(format)>;
    (bits == 0   ? codes_of<Block, 0>
     : bits == 2 ? codes_of<Block, 2>
     : bits == 4 ? codes_of<Block, 4>
                 : codes_of<Block, 8>)(row, n, span, plane, q, scale, offset, stride);
  });
}

static void signs(const uint32_t* words, int64_t n, int16_t* q) {
#if defined(EDGEES_ARM_AVX512)
  for (int64_t j = 0; j < n; j += 32) {
    const __m512i one = _mm512_set1_epi16(1);
    _mm512_storeu_si512(q + j, _mm512_mask_sub_epi16(one, words[j >> 5], zero_i(), one));
  }
#else
  for (int64_t j = 0; j < n; j += 32) {
    const uint32_t word = words[j >> 5];
    for (int k = 0; k < 32; ++k) q[j + k] = static_cast<int16_t>(1 - 2 * (word >> k & 1));
  }
#endif
}

// R rows times one panel.
template <int R, int GROUP, bool OFFSET>
EDGEES_INLINE void panel_rows(const Codes16& w, bool add, int64_t row, int64_t n, const int16_t* x,
                              const float* scale, const float* sum, float* out) {
  F acc[R];
  for (int r = 0; r < R; ++r) acc[r] = add ? load(out + r * L) : zero();
  const int16_t* q = w.q + row * w.ld;
  const float* ws = w.scale + row;
  const float* wo = OFFSET ? w.offset + row : nullptr;
  for (int64_t i = 0; i < n; i += kGroup, scale += L, sum += L) {
    const F by = load(scale);
    for (int h = 0; h < kGroup; h += GROUP, ws += w.stride) {
      I part[R];
      for (int r = 0; r < R; ++r) part[r] = zero_i();
#pragma GCC unroll 16
      for (int k = 0; k < GROUP; k += 2) {
        const auto v = load_i(x + k * L);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) part[r] = pair_add(part[r], v, q + r * w.ld + i + h + k);
      }
      x += GROUP * L;
      for (int r = 0; r < R; ++r) acc[r] = fma(mul(to_float(part[r]), by), set1(ws[r]), acc[r]);
    }
    if (OFFSET) {
      const F total = load(sum);
      for (int r = 0; r < R; ++r) acc[r] = fma(total, set1(wo[r]), acc[r]);
      wo += w.stride;
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * L, acc[r]);
}

template <int GROUP, bool OFFSET>
static void panel_of(const Codes16& w, bool add, int rows, int64_t n, const int16_t* x,
                     const float* scale, const float* sum, float* out) {
#if defined(EDGEES_ARM_AVX2)
  constexpr int R = 4;  // of sixteen registers: 4 sums, 4 parts, a column, its scale, a pair
#else
  constexpr int R = 12;
#endif
  int r = 0;
  for (; r + R <= rows; r += R)
    panel_rows<R, GROUP, OFFSET>(w, add, r, n, x, scale, sum, out + r * L);
  for (; r + 4 <= rows; r += 4)
    panel_rows<4, GROUP, OFFSET>(w, add, r, n, x, scale, sum, out + r * L);
  for (; r < rows; ++r) panel_rows<1, GROUP, OFFSET>(w, add, r, n, x, scale, sum, out + r * L);
}

static void panel(const Codes16& w, bool add, int rows, int64_t n, const int16_t* x,
                  const float* scale, const float* sum, float* out) {
  if (w.group == 16) return panel_of<16, false>(w, add, rows, n, x, scale, sum, out);
  if (w.offset) return panel_of<32, true>(w, add, rows, n, x, scale, sum, out);
  panel_of<32, false>(w, add, rows, n, x, scale, sum, out);
}

static void add_panel_signs(float* out, int rows, int64_t row, const uint32_t* words,
                            const float* by) {
  const F v = load(by);
  for (int r = 0; r < rows; ++r, ++row) {
    const uint32_t* w = words + row / 32 * L;
    const int bit = static_cast<int>(row & 31);
#if defined(EDGEES_ARM_AVX512)
    const __m512i sign =
        _mm512_and_si512(_mm512_sll_epi32(_mm512_loadu_si512(w), _mm_cvtsi32_si128(31 - bit)),
                         _mm512_set1_epi32(INT32_MIN));
    const F moved = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), sign));
#elif defined(EDGEES_ARM_AVX2)
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i sign = _mm256_and_si256(_mm256_sll_epi32(all, _mm_cvtsi32_si128(31 - bit)),
                                          _mm256_set1_epi32(INT32_MIN));
    const F moved = _mm256_xor_ps(v, _mm256_castsi256_ps(sign));
#else
    const uint32x4_t sign =
        vandq_u32(vshlq_u32(vld1q_u32(w), vdupq_n_s32(31 - bit)), vdupq_n_u32(0x80000000u));
    const F moved = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), sign));
#endif
    store(out + r * L, add(load(out + r * L), moved));
  }
}

static int64_t peak(int64_t n) {
  constexpr int R = 10;  // sums in registers: enough to hide the latency
  alignas(64) static const int16_t one[2 * L] = {1, 1};
  I acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero_i();
  auto x = load_i(one);
  for (int64_t i = 0; i < n; ++i) {
#if defined(EDGEES_ARM_NEON)
    for (int r = 0; r < R; ++r) acc[r] = pair_add(acc[r], x, one);
    __asm__ volatile("" : "+w"(x));
#else
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = dot_add(acc[r], x, x);
    __asm__ volatile("" : "+v"(x));
#endif
  }
  I all = acc[0];
#if defined(EDGEES_ARM_NEON)
  for (int r = 1; r < R; ++r) all = vaddq_s32(all, acc[r]);
#elif defined(EDGEES_ARM_AVX512)
  for (int r = 1; r < R; ++r) all = _mm512_add_epi32(all, acc[r]);
#else
  for (int r = 1; r < R; ++r) all = _mm256_add_epi32(all, acc[r]);
#endif
  alignas(64) float out[L];
  store(out, to_float(all));
  return out[0] < 0 ? 0 : n * R * 2 * L;
}

static void unpanel(const float* from, int rows, int count, float* const* y, int64_t first) {
#if defined(EDGEES_ARM_AVX512)
  // Four rows at a time: lane 4k + r of v[c] is row r of column 4k + c.
  const auto four = [](const float* p, F* v) {
    const F a = load(p), b = load(p + 16), c = load(p + 32), d = load(p + 48);
    const F ab = _mm512_unpacklo_ps(a, b), cd = _mm512_unpacklo_ps(c, d);
    const F AB = _mm512_unpackhi_ps(a, b), CD = _mm512_unpackhi_ps(c, d);
    v[0] = _mm512_shuffle_ps(ab, cd, 0x44);
    v[1] = _mm512_shuffle_ps(ab, cd, 0xEE);
    v[2] = _mm512_shuffle_ps(AB, CD, 0x44);
    v[3] = _mm512_shuffle_ps(AB, CD, 0xEE);
  };
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    F v[4];
    four(from + r * L, v);
    for (int c = 0; c < 4; ++c) {
      float* p[4];
      for (int k = 0; k < 4; ++k) p[k] = 4 * k + c < count ? y[4 * k + c] + first + r : nullptr;
      if (p[0]) _mm_storeu_ps(p[0], _mm512_castps512_ps128(v[c]));
      if (p[1]) _mm_storeu_ps(p[1], _mm512_extractf32x4_ps(v[c], 1));
      if (p[2]) _mm_storeu_ps(p[2], _mm512_extractf32x4_ps(v[c], 2));
      if (p[3]) _mm_storeu_ps(p[3], _mm512_extractf32x4_ps(v[c], 3));
    }
  }
#else
  int r = 0;
#endif
  for (; r < rows; ++r)
    for (int c = 0; c < count; ++c) y[c][first + r] = from[r * L + c];
}

template <int GROUP, bool OFFSET>
static void column_of(const Codes16& w, int rows, int64_t n, const int16_t* x, const float* scale,
                      const float* sum, float* y) {
  for (int first = 0; first < rows; first += L) {
    const int some = rows - first < L ? rows - first : L;
    const int16_t* q = w.q + first * w.ld;
    const float* ws = w.scale + first;
    const float* wo = OFFSET ? w.offset + first : nullptr;
    alignas(64) float out[L] = {};
    memcpy(out, y + first, static_cast<size_t>(some) * sizeof(float));
    F acc = load(out);
    for (int64_t i = 0; i < n; i += kGroup) {
      const F by = set1(scale[i / kGroup]);
      for (int h = 0; h < kGroup; h += GROUP, ws += w.stride) {
        I part[L];
        for (int r = 0; r < L; ++r) {  // lanes without a row repeat the first, and are dropped
          const int16_t* p = q + (r < some ? r : 0) * w.ld + i + h;
          part[r] = GROUP == 32 ? dot_32(p, x + i + h) : dot_16(p, x + i + h);
        }
        acc = fma(mul(to_float(lane_sums(part)), by), load(ws), acc);
      }
      if (OFFSET) {
        acc = fma(set1(sum[i / kGroup]), load(wo), acc);
        wo += w.stride;
      }
    }
    store(out, acc);
    memcpy(y + first, out, static_cast<size_t>(some) * sizeof(float));
  }
}

static void column(const Codes16& w, int rows, int64_t n, const int16_t* x, const float* scale,
                   const float* sum, float* y) {
  if (w.group == 16) return column_of<16, false>(w, rows, n, x, scale, sum, y);
  if (w.offset) return column_of<32, true>(w, rows, n, x, scale, sum, y);
  column_of<32, false>(w, rows, n, x, scale, sum, y);
}
