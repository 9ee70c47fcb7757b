// Weights as integers (scalar_integer.inl says which), for the vector arms.
#if !defined(EDGEES_ARM_NEON)
using Bytes = __m128i;
static inline Bytes bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
#endif

#if !defined(EDGEES_ARM_AVX512)
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
    scales_of(b, s, o);
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

#if defined(EDGEES_ARM_AVX2)
// 32 bytes, the middle quarters exchanged: pairs unpacked from two such lie in order.
static inline __m256i quarters(const void* p) {
  return _mm256_permute4x64_epi64(_mm256_loadu_si256(static_cast<const __m256i*>(p)), 0xD8);
}
// `bits` bits of each of these bytes, from bit `from` on.
static inline __m256i part_of(__m256i v, int from, int bits) {
  return _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi32_si128(from)),
                          _mm256_set1_epi8(static_cast<char>((1 << bits) - 1)));
}
// The nibbles of 16 bytes, low ones first, as `quarters` has them.
static inline __m256i nibble_quarters(const void* p) {
  const __m256i v = _mm256_permute4x64_epi64(_mm256_castsi128_si256(bytes(p)), 0x50);
  return _mm256_and_si256(_mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 4, 0, 4)),
                          _mm256_set1_epi8(15));
}

// Codes less Block::lo of weights 32j.. of a block.
template <class Block>
static inline __m256i code_bytes(const Block* b, int j) {
  if constexpr (std::is_same_v<Block, Q4_K>) {  // 32 bytes: one group low, the next high
    return part_of(quarters(b->qs + j / 2 * 32), j % 2 * 4, 4);
  } else if constexpr (std::is_same_v<Block, Q5_K>) {
    return _mm256_or_si256(part_of(quarters(b->qs + j / 2 * 32), j % 2 * 4, 4),
                           _mm256_slli_epi16(part_of(quarters(b->qh), j, 1), 4));
  } else if constexpr (std::is_same_v<Block, Q6_K>) {
    return _mm256_or_si256(
        part_of(quarters(b->ql + j / 4 * 64 + j % 2 * 32), j / 2 % 2 * 4, 4),
        _mm256_slli_epi16(part_of(quarters(b->qh + j / 4 * 32), j % 4 * 2, 2), 4));
  } else if constexpr (std::is_same_v<Block, Q8_0>) {
    return _mm256_xor_si256(quarters(b->qs), _mm256_set1_epi8(-128));
  } else if constexpr (Block::hi - Block::lo == 15) {
    return nibble_quarters(b->qs);
  } else {  // unpack() adds lo
    alignas(32) int8_t room[Block::weights];
    b->unpack(room);
    return _mm256_sub_epi8(quarters(room), _mm256_set1_epi8(static_cast<char>(Block::lo)));
  }
}

// The same where the step fits a byte: code and step of a weight lie side by side, and one
// multiplication does both.
template <class Block, int BITS>
static void paired_codes_of(const void* row, int64_t n, int span, const uint8_t* plane, int16_t* q,
                            float* scale, float* offset, int64_t stride) {
  const Block* b = static_cast<const Block*>(row);
  constexpr int groups = Block::weights / Block::group, one = 1 << BITS;
  const float part = power_of_two(-BITS);
  __m256i by[2], more[2];  // for scales above and below zero
  for (int k = 0; k < 2; ++k) {
    const int step = k ? -(1 << span) : 1 << span;
    by[k] = _mm256_set1_epi16(static_cast<int16_t>((one & 255) | (step & 255) << 8));
    more[k] =
        _mm256_set1_epi16(static_cast<int16_t>(Block::lo * one - (BITS ? step * (one / 2) : 0)));
  }
  for (int64_t i = 0; i < n; i += Block::weights, ++b) {
    float s[groups], o[groups] = {};
    scales_of(b, s, o);
    for (int g = 0; g < groups; ++g, scale += stride, offset += stride) {
      *scale = s[g] * part;
      if (Block::offset) *offset = o[g];
    }
#pragma GCC unroll 8
    for (int j = 0; j < Block::weights / 32; ++j, plane += 4 * BITS) {
      const __m256i code = code_bytes(b, j);
      __m256i step = zero_i();
      if constexpr (BITS == 4) {
        step = nibble_quarters(plane);
      } else if constexpr (BITS == 2) {
        alignas(32) uint8_t all[32];
        unpack_plane(2, plane, all);
        step = quarters(all);
      }
      __m256i half[2] = {_mm256_unpacklo_epi8(code, step), _mm256_unpackhi_epi8(code, step)};
      for (int h = 0; h < 2; ++h) {
        uint32_t sign;
        memcpy(&sign, &s[(32 * j + 16 * h) / Block::group], 4);
        const int below = BITS ? static_cast<int>(sign >> 31) : 0;
        if (BITS) half[h] = _mm256_maddubs_epi16(half[h], by[below]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i + 32 * j + 16 * h),
                            _mm256_add_epi16(half[h], more[below]));
      }
    }
  }
}
#endif

#else
// Groups in the arm's own order.
static inline __m512i by_lane(int a, int b, int c, int d) {
  const __m256i low = _mm256_set_m128i(_mm_set1_epi16(static_cast<int16_t>(b)),
                                       _mm_set1_epi16(static_cast<int16_t>(a)));
  const __m256i high = _mm256_set_m128i(_mm_set1_epi16(static_cast<int16_t>(d)),
                                        _mm_set1_epi16(static_cast<int16_t>(c)));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
// Words of 32 bytes, `bits` from bit `from` of each on.
static inline __m512i words_of(const void* p, int from = 0, int bits = 8) {
  const __m512i first = _mm512_broadcast_i32x4(bytes(p));
  const __m512i v =
      _mm512_mask_broadcast_i32x4(first, 0xFF00, bytes(static_cast<const uint8_t*>(p) + 16));
  return _mm512_and_si512(_mm512_srlv_epi16(v, by_lane(from, from + 8, from, from + 8)),
                          _mm512_set1_epi16(static_cast<int16_t>((1 << bits) - 1)));
}
// The nibbles of 16 bytes as the words of 32 weights, low ones first; in the high bytes.
static inline __m512i nibble_words(const void* p) {
  const __m512i v = _mm512_broadcast_i32x4(bytes(p));
  return _mm512_and_si512(_mm512_srlv_epi16(v, by_lane(0, 8, 4, 12)), _mm512_set1_epi16(15));
}
static inline __m512i high_nibble_words(const void* p) {
  const __m512i v = _mm512_broadcast_i32x4(bytes(p));
  const __m512i left = _mm512_setr_epi64(8, 8, 0, 0, 4, 4, 60, 60);  // bits stay in their words
  return _mm512_and_si512(_mm512_rolv_epi64(v, left), _mm512_set1_epi16(15 << 8));
}

// Codes less Block::lo of weights 32j.. of a block.
template <class Block>
static inline __m512i code_words(const Block* b, int j) {
  if constexpr (std::is_same_v<Block, Q4_K>) {  // 32 bytes: one group low, the next high
    return words_of(b->qs + j / 2 * 32, j % 2 * 4, 4);
  } else if constexpr (std::is_same_v<Block, Q5_K>) {
    return _mm512_or_si512(words_of(b->qs + j / 2 * 32, j % 2 * 4, 4),
                           _mm512_slli_epi16(words_of(b->qh, j, 1), 4));
  } else if constexpr (std::is_same_v<Block, Q6_K>) {
    return _mm512_or_si512(words_of(b->ql + j / 4 * 64 + j % 2 * 32, j / 2 % 2 * 4, 4),
                           _mm512_slli_epi16(words_of(b->qh + j / 4 * 32, j % 4 * 2, 2), 4));
  } else if constexpr (std::is_same_v<Block, Q8_0>) {
    return _mm512_xor_si512(words_of(b->qs), _mm512_set1_epi16(128));
  } else if constexpr (Block::hi - Block::lo == 15) {
    return nibble_words(b->qs);
  } else {  // unpack() adds lo
    alignas(32) int8_t room[Block::weights];
    b->unpack(room);
    const __m512i v = _mm512_sub_epi16(words_of(room), _mm512_set1_epi16(Block::lo));
    return _mm512_and_si512(v, _mm512_set1_epi16(255));
  }
}

// A row. Scales of blocks of 32 stay binary16, in the low halves of their places.
// PAIRED: code and step of a weight lie side by side in bytes, and one multiplication does both.
template <class Block, int BITS, bool PAIRED>
static void codes_of(const void* row, int64_t n, int span, const uint8_t* plane, int16_t* q,
                     float* scale, float* offset, int64_t stride) {
  const Block* b = static_cast<const Block*>(row);
  constexpr int groups = Block::weights / Block::group;
  constexpr bool own_signs = std::is_same_v<Block, Q6_K>;
  __m512i by[4], more[4];  // bit h of the index: the scale of half h is below zero
  for (int k = 0; k < 4; ++k) {
    int16_t a[2], b[2];
    for (int h = 0; h < 2; ++h) {
      const int step = k >> h & 1 ? -(1 << span) : 1 << span, one = 1 << BITS;
      a[h] = static_cast<int16_t>((one & 255) | (step & 255) << 8);
      b[h] = static_cast<int16_t>(Block::lo * one - (PAIRED ? step * (one / 2) : 0));
    }
    by[k] = _mm512_mask_mov_epi16(_mm512_set1_epi16(a[0]), 0xFFFF0000u, _mm512_set1_epi16(a[1]));
    more[k] = _mm512_mask_mov_epi16(_mm512_set1_epi16(b[0]), 0xFFFF0000u, _mm512_set1_epi16(b[1]));
  }
  const __m512i middle = _mm512_set1_epi16(static_cast<int16_t>(BITS ? 1 << (BITS - 1) : 0));
  const __m128i up = _mm_cvtsi32_si128(span);
  for (int64_t i = 0; i < n; i += Block::weights, ++b) {
    uint32_t below = 0;  // Q6_K: which of the scales are negative, zeros too
    const int minus = b->d >> 15;
    if constexpr (Block::weights == 32) {
      memcpy(scale, &b->d, 2);
      scale += stride;
      if constexpr (Block::offset) {
        memcpy(offset, &b->m, 2);
        offset += stride;
      }
    } else {
      float s[16], o[16];
      scales_of(b, s, o);
      if constexpr (own_signs) below = _mm512_movepi32_mask(_mm512_loadu_si512(s));
      for (int g = 0; g < groups; ++g, scale += stride, offset += stride) {
        *scale = s[g] * power_of_two(-BITS);
        if (Block::offset) *offset = o[g];
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < Block::weights / 32; ++j, plane += 4 * BITS) {
      __m512i v = code_words(b, j);
      const int signs = own_signs ? static_cast<int>(below >> 2 * j & 3) : 3 * minus;
      if constexpr (BITS == 0) {
        v = _mm512_add_epi16(v, more[0]);
      } else {
        alignas(32) uint8_t all[32];
        if constexpr (BITS == 2) unpack_plane(2, plane, all);
        if constexpr (PAIRED) {
          v = _mm512_or_si512(
              v, BITS == 4 ? high_nibble_words(plane) : _mm512_slli_epi16(words_of(all), 8));
          v = _mm512_add_epi16(_mm512_maddubs_epi16(v, by[signs]), more[signs]);
        } else {
          const __m512i steps = BITS == 4   ? nibble_words(plane)
                                : BITS == 2 ? words_of(all)
                                            : words_of(plane);
          const __m512i move = _mm512_sll_epi16(_mm512_sub_epi16(steps, middle), up);
          v = _mm512_add_epi16(_mm512_slli_epi16(v, BITS), more[0]);
          const __mmask32 lanes = (signs & 1 ? 0xFFFFu : 0) | (signs & 2 ? 0xFFFF0000u : 0);
          v = _mm512_mask_sub_epi16(_mm512_add_epi16(v, move), lanes, v, move);
        }
      }
      _mm512_storeu_si512(q + i + 32 * j, v);
    }
  }
}

// Places of binary16 to floats times `by`, for `rows` rows and all groups.
static void from_halves(float* at, int64_t groups, int64_t stride, int rows, float by) {
  for (int64_t g = 0; g < groups; ++g)
    for (int r = 0; r < rows; r += L) {
      const __mmask16 some = rows - r < L ? static_cast<__mmask16>((1u << (rows - r)) - 1) : 0xFFFF;
      float* p = at + g * stride + r;
      const __m256i half = _mm512_cvtepi32_epi16(_mm512_maskz_loadu_epi32(some, p));
      _mm512_mask_storeu_ps(p, some, mul(_mm512_cvtph_ps(half), set1(by)));
    }
}
#endif

// 32 weights of a type with a table, from 16 bytes, without a plane; in the arm's order.
#if defined(EDGEES_ARM_AVX512)
using Levels = __m512i;  // twice over: the fifth bit of an index does not matter
static inline Levels levels(const int16_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline __m512i level_words(const uint8_t* p, Levels level) {
  const __m512i twice =
      _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3),
                               _mm512_castsi256_si512(_mm256_cvtepu8_epi16(bytes(p))));
  return _mm512_permutexvar_epi16(_mm512_srlv_epi16(twice, by_lane(4, 0, 4, 0)), level);
}
static inline void level_codes(const uint8_t* p, Levels level, int16_t* q) {
  _mm512_storeu_si512(q, level_words(p, level));
}
static inline void add_steps(int bits, const uint8_t* plane, int16_t by, int16_t* q) {
  alignas(32) uint8_t all[32];
  if (bits == 2) unpack_plane(2, plane, all);
  const __m512i steps = bits == 4 ? nibble_words(plane) : words_of(bits == 2 ? all : plane);
  const __m512i move = _mm512_mullo_epi16(
      _mm512_sub_epi16(steps, _mm512_set1_epi16(static_cast<int16_t>(1 << (bits - 1)))),
      _mm512_set1_epi16(by));
  _mm512_storeu_si512(q, _mm512_add_epi16(_mm512_loadu_si512(q), move));
}
#else
struct Levels {
  Bytes low, high;
};
static inline Levels levels(const int16_t* p) {
  alignas(16) uint8_t part[2][16];
  for (int k = 0; k < 32; ++k) part[k % 2][k / 2] = reinterpret_cast<const uint8_t*>(p)[k];
  return {bytes(part[0]), bytes(part[1])};
}
static inline void level_codes(const uint8_t* p, Levels level, int16_t* q) {
  const Bytes both = bytes(p);
#if defined(EDGEES_ARM_NEON)
  const uint8x16x2_t code = vzipq_u8(high_nibbles(both), low_nibbles(both));
  for (int h = 0; h < 2; ++h) {
    const uint8x16x2_t v =
        vzipq_u8(vqtbl1q_u8(level.low, code.val[h]), vqtbl1q_u8(level.high, code.val[h]));
    vst1q_u8(reinterpret_cast<uint8_t*>(q + 16 * h), v.val[0]);
    vst1q_u8(reinterpret_cast<uint8_t*>(q + 16 * h + 8), v.val[1]);
  }
#else
  const Bytes high = high_nibbles(both), low = low_nibbles(both);
  const Bytes code[2] = {_mm_unpacklo_epi8(high, low), _mm_unpackhi_epi8(high, low)};
  for (int h = 0; h < 2; ++h) {
    const Bytes l = _mm_shuffle_epi8(level.low, code[h]), u = _mm_shuffle_epi8(level.high, code[h]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * h), _mm_unpacklo_epi8(l, u));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * h + 8), _mm_unpackhi_epi8(l, u));
  }
#endif
}
static inline void add_steps(int bits, const uint8_t* plane, int16_t by, int16_t* q) {
  uint8_t steps[32];
  unpack_plane(bits, plane, steps);
  const int16_t middle = static_cast<int16_t>(1 << (bits - 1));
  for (int k = 0; k < 32; ++k)
    q[k] = static_cast<int16_t>(q[k] + static_cast<int16_t>(steps[k] - middle) * by);
}
#endif

static void table_codes(const Rows& from, int rows, int64_t n, const Codes16& to) {
  const Levels level = levels(levels_of(from.type));
  const int step = 1 << (kTableBits - kTableCellBits + from.span - from.bits);
  for (int r = 0; r < rows; ++r) {
    const TableRow row(from, r);
    const uint8_t* plane = from.plane + r * from.plane_stride;
    if (from.next_base) {
      const uint8_t* next = from.base + r * from.base_stride + from.next_base;
      for (int64_t i = 0; i < n / Table4::weights * row.step; i += 64) __builtin_prefetch(next + i);
    }
    if (from.next_plane) {
      for (int64_t i = 0; i < plane_bytes(from.bits, n); i += 64)
        __builtin_prefetch(plane + from.next_plane + i);
    }
    float* scale = to.scale + r;
    int16_t* q = to.q + r * to.ld;
    for (int64_t i = 0; i < n / Table4::weights; ++i, q += Table4::weights) {
      const float d = row.d(i);
      for (int h = 0; h < 2; ++h, scale += to.stride) {
        *scale = d * power_of_two(-kTableBits);
        level_codes(row.qs(i) + 16 * h, level, q + 32 * h);
        if (!from.bits) continue;
        add_steps(from.bits, plane, static_cast<int16_t>(std::signbit(d) ? -step : step),
                  q + 32 * h);
        plane += 4 * from.bits;
      }
    }
  }
}

static bool codes(const Rows& from, int rows, int64_t n, const Codes16& to) {
  if (is_table(from.type)) {
    table_codes(from, rows, n, to);
    return true;
  }
  return with_format(from.type, [&](auto* format) {
    using Block = std::remove_pointer_t<decltype(format)>;
#if defined(EDGEES_ARM_AVX512)
    const bool paired = from.span <= 6;
    const auto row = from.bits == 0             ? codes_of<Block, 0, false>
                     : from.bits == 2 && paired ? codes_of<Block, 2, true>
                     : from.bits == 2           ? codes_of<Block, 2, false>
                     : from.bits == 4 && paired ? codes_of<Block, 4, true>
                     : from.bits == 4           ? codes_of<Block, 4, false>
                                                : codes_of<Block, 8, false>;
#elif defined(EDGEES_ARM_AVX2)
    const bool paired = from.span <= 6 && from.bits < 8;
    const auto row = from.bits == 0             ? paired_codes_of<Block, 0>
                     : from.bits == 2 && paired ? paired_codes_of<Block, 2>
                     : from.bits == 4 && paired ? paired_codes_of<Block, 4>
                     : from.bits == 2           ? codes_of<Block, 2>
                     : from.bits == 4           ? codes_of<Block, 4>
                                                : codes_of<Block, 8>;
#else
    const auto row = from.bits == 0   ? codes_of<Block, 0>
                     : from.bits == 2 ? codes_of<Block, 2>
                     : from.bits == 4 ? codes_of<Block, 4>
                                      : codes_of<Block, 8>;
#endif
    const int64_t bytes = n / Block::weights * static_cast<int64_t>(sizeof(Block));
    for (int r = 0; r < rows; ++r) {
      const uint8_t *base = from.base + r * from.base_stride,
                    *plane = from.plane + r * from.plane_stride;
      if (from.next_base) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(base + from.next_base + i);
      }
      if (from.next_plane) {
        for (int64_t i = 0; i < plane_bytes(from.bits, n); i += 64)
          __builtin_prefetch(plane + from.next_plane + i);
      }
      row(base, n, from.span, plane, to.q + r * to.ld, to.scale + r, to.offset + r, to.stride);
    }
#if defined(EDGEES_ARM_AVX512)
    if constexpr (Block::weights == 32) {
      from_halves(to.scale, n / 32, to.stride, rows, power_of_two(-from.bits));
      if (Block::offset) from_halves(to.offset, n / 32, to.stride, rows, 1.0f);
    }
#endif
  });
}
