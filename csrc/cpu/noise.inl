// Noise kernels of the SIMD arms; scalar_noise.inl says what they compute. Included after simd.h.

// ---- Philox. On x86 a state word lives in the low half of a 64-bit lane: vpmuludq reads only low
// halves, so the high halves may hold leftovers and a round is 2 multiplies, 2 shifts, 4 xors.
#if defined(EDGEES_ARM_AVX512)
using U = __m512i;
constexpr int kBlocks = 8;  // Philox blocks to a vector
static inline U splat(uint32_t v) { return _mm512_set1_epi64(v); }
// The order of the lanes makes the two unpacks below come out as blocks 0-3 and 4-7.
static inline U counters(uint32_t first) {
  return _mm512_add_epi32(splat(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
}
static inline U times(U a, U b) { return _mm512_mul_epu32(a, b); }
static inline U high_xor(U product, U b, U c) {
  return _mm512_ternarylogic_epi64(_mm512_srli_epi64(product, 32), b, c, 0x96);
}
static inline void store_blocks(uint32_t* out, U c0, U c1, U c2, U c3) {
  const U low = _mm512_mask_blend_epi32(0xAAAA, c0, _mm512_slli_epi64(c1, 32));
  const U high = _mm512_mask_blend_epi32(0xAAAA, c2, _mm512_slli_epi64(c3, 32));
  _mm512_storeu_si512(out, _mm512_unpacklo_epi64(low, high));
  _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi64(low, high));
}
#elif defined(EDGEES_ARM_AVX2)
using U = __m256i;
constexpr int kBlocks = 4;
static inline U splat(uint32_t v) { return _mm256_set1_epi64x(v); }
static inline U counters(uint32_t first) {
  return _mm256_add_epi32(splat(first), _mm256_setr_epi64x(0, 2, 1, 3));
}
static inline U times(U a, U b) { return _mm256_mul_epu32(a, b); }
static inline U high_xor(U product, U b, U c) {
  return _mm256_xor_si256(_mm256_srli_epi64(product, 32), _mm256_xor_si256(b, c));
}
static inline void store_blocks(uint32_t* out, U c0, U c1, U c2, U c3) {
  const U low = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
  const U high = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
  __m256i* p = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(p, _mm256_unpacklo_epi64(low, high));
  _mm256_storeu_si256(p + 1, _mm256_unpackhi_epi64(low, high));
}
#endif

#if defined(EDGEES_ARM_NEON)
using U = uint32x4_t;
constexpr int kBlocks = 4;
static inline U splat(uint32_t v) { return vdupq_n_u32(v); }
#endif

// Counters and round keys of one call, spread over vectors once.
struct Philox {
  U row, tensor, stream, k0[kNoiseRounds], k1[kNoiseRounds];

  Philox(uint64_t key, uint32_t row, uint32_t tensor, uint32_t stream)
      : Philox(key, splat(row), tensor, stream) {}
  Philox(uint64_t key, U row, uint32_t tensor, uint32_t stream)
      : row(row), tensor(splat(tensor)), stream(splat(stream)) {
    for (uint32_t r = 0; r < kNoiseRounds; ++r) {
      k0[r] = splat(static_cast<uint32_t>(key) + r * kPhiloxW0);
      k1[r] = splat(static_cast<uint32_t>(key >> 32) + r * kPhiloxW1);
    }
  }

#if !defined(EDGEES_ARM_NEON)
  struct State {
    U c0, c1, c2, c3;
  };
  // One block in each lane, which has its own number and row.
  inline State run(U block, U rows) const {
    const U m0 = splat(kPhiloxM0), m1 = splat(kPhiloxM1);
    U c0 = block, c1 = rows, c2 = tensor, c3 = stream;
    for (int r = 0; r < kNoiseRounds; ++r) {
      const U p0 = times(c0, m0), p1 = times(c2, m1);
      c0 = high_xor(p1, c1, k0[r]);
      c2 = high_xor(p0, c3, k1[r]);
      c1 = p1;
      c3 = p0;
    }
    return {c0, c1, c2, c3};
  }
#endif

  // Blocks first .. first + kBlocks - 1.
  inline void blocks(uint32_t first, uint32_t* out) const {
#if defined(EDGEES_ARM_NEON)
    const U m0 = splat(kPhiloxM0), m1 = splat(kPhiloxM1);
    static const uint32_t iota[4] = {0, 1, 2, 3};
    uint32x4x4_t c = {{vaddq_u32(splat(first), vld1q_u32(iota)), row, tensor, stream}};
    for (int r = 0; r < kNoiseRounds; ++r) {
      const U p0 = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(c.val[0]), vget_low_u32(m0)));
      const U q0 = vreinterpretq_u32_u64(vmull_high_u32(c.val[0], m0));
      const U p1 = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(c.val[2]), vget_low_u32(m1)));
      const U q1 = vreinterpretq_u32_u64(vmull_high_u32(c.val[2], m1));
      c.val[0] = veorq_u32(veorq_u32(vuzp2q_u32(p1, q1), c.val[1]), k0[r]);
      c.val[2] = veorq_u32(veorq_u32(vuzp2q_u32(p0, q0), c.val[3]), k1[r]);
      c.val[1] = vuzp1q_u32(p1, q1);
      c.val[3] = vuzp1q_u32(p0, q0);
    }
    vst4q_u32(out, c);
#else
    const State s = run(counters(first), row);
    store_blocks(out, s.c0, s.c1, s.c2, s.c3);
#endif
  }
};

static void philox(uint64_t key, uint32_t row, uint32_t tensor, uint32_t stream, uint32_t first,
                   int64_t n, uint32_t* out) {
  const Philox p(key, row, tensor, stream);
  int64_t b = 0;
  for (; b + kBlocks <= n; b += kBlocks) p.blocks(first + static_cast<uint32_t>(b), out + 4 * b);
  if (b < n) {
    uint32_t rest[4 * kBlocks];
    p.blocks(first + static_cast<uint32_t>(b), rest);
    memcpy(out + 4 * b, rest, static_cast<size_t>(n - b) * 16);
  }
}

// ---- Signs. The 32 / L vectors of one word, sign bits of lane i of vector k from bit k*L + i.
template <typename Body>
static inline void each_flip(uint32_t word, Body&& body) {
#if defined(EDGEES_ARM_AVX2)  // one broadcast for four vectors
  const __m256i all = _mm256_set1_epi32(static_cast<int>(word));
  const __m256i top = _mm256_set1_epi32(INT32_MIN);
  const __m256i place = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  for (int k = 0; k < 4; ++k) {
    const __m256i s = _mm256_sllv_epi32(all, _mm256_sub_epi32(place, _mm256_set1_epi32(8 * k)));
    const F sign = _mm256_castsi256_ps(_mm256_and_si256(s, top));
    body(k, [sign](F v) { return _mm256_xor_ps(v, sign); });
  }
#else
  for (int k = 0; k < 32 / L; ++k) body(k, [=](F v) { return flip(v, word >> (k * L)); });
#endif
}

static void add_signs(float* row, int64_t n, const uint32_t* words, float amp) {
  const F a = set1(amp);
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
    each_flip(words[j >> 5], [&](int k, auto signed_by) {
      float* p = row + j + k * L;
      store(p, add(load(p), signed_by(a)));
    });
  }
  for (; j < n; ++j) row[j] += sign_bit(words, j) ? -amp : amp;
}

static float sign_dot(const uint32_t* words, const float* x, int64_t n) {
  F acc = zero();
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
    each_flip(words[j >> 5],
              [&](int k, auto signed_by) { acc = add(acc, signed_by(load(x + j + k * L))); });
  }
  for (; j + L <= n; j += L) {
    acc = add(acc, flip(load(x + j), words[j >> 5] >> (j & 31)));
  }
  float total = sum(acc);
  for (; j < n; ++j) total += sign_bit(words, j) ? -x[j] : x[j];
  return total;
}

// ---- Normals: amp * integer of the L half-words from `words` on.
#if defined(EDGEES_ARM_AVX512)
static inline F normals(const uint32_t* words, F amp) {
  const __m512i v =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
  const __m512i i = _mm512_and_si512(_mm512_srli_epi32(v, 4), _mm512_set1_epi32(0x7FF));
  const __m512i t = _mm512_i32gather_epi32(i, kNormalTable, 4);
  const __m512i d = _mm512_sub_epi32(_mm512_i32gather_epi32(i, kNormalTable + 1, 4), t);
  const __m512i f = _mm512_and_si512(v, _mm512_set1_epi32(0xF));
  const __m512i m = _mm512_add_epi32(t, _mm512_srai_epi32(_mm512_mullo_epi32(d, f), 4));
  const __mmask16 minus = _mm512_test_epi32_mask(v, _mm512_set1_epi32(0x8000));
  const __m512i value = _mm512_mask_sub_epi32(m, minus, _mm512_setzero_si512(), m);
  return mul(amp, _mm512_cvtepi32_ps(value));
}
#elif defined(EDGEES_ARM_AVX2)
static inline F normals(const uint32_t* words, F amp) {
  const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
  const __m256i i = _mm256_and_si256(_mm256_srli_epi32(v, 4), _mm256_set1_epi32(0x7FF));
  const __m256i t = _mm256_i32gather_epi32(kNormalTable, i, 4);
  const __m256i d = _mm256_sub_epi32(_mm256_i32gather_epi32(kNormalTable + 1, i, 4), t);
  const __m256i f = _mm256_and_si256(v, _mm256_set1_epi32(0xF));
  const __m256i m = _mm256_add_epi32(t, _mm256_srai_epi32(_mm256_mullo_epi32(d, f), 4));
  const __m256i minus = _mm256_srai_epi32(_mm256_slli_epi32(v, 16), 31);
  return mul(amp, _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_xor_si256(m, minus), minus)));
}
#elif defined(EDGEES_ARM_NEON)
static inline F normals(const uint32_t* words, F amp) {  // no gather: the look-ups are scalar
  int32_t value[4];
  for (int i = 0; i < 4; ++i) value[i] = normal_integer(kNormalTable, half_word(words, i));
  return mul(amp, from_i32(value));
}
#endif

static void add_normals(float* row, int64_t n, const uint32_t* words, float amp) {
  const F a = set1(amp);
  int64_t j = 0;
  for (; j + L <= n; j += L) store(row + j, add(load(row + j), normals(words + j / 2, a)));
  for (; j < n; ++j) {
    row[j] += amp * static_cast<float>(normal_integer(kNormalTable, half_word(words, j)));
  }
}

static void decay_add(float* delta, const float* acc, int64_t n, float keep) {
  const F k = set1(keep);
  int64_t j = 0;
  for (; j + L <= n; j += L) store(delta + j, add(mul(k, load(delta + j)), load(acc + j)));
  for (; j < n; ++j) delta[j] = keep * delta[j] + acc[j];
}
