// One float vector type per instruction set, so that kernels are written once (*.inl) and compiled
// per arm. No include guard: included once inside each arm's namespace, after its target pragma.
#if defined(EDGEES_ARM_AVX512)
using F = __m512;
constexpr int L = 16;
// The even weights of either half, then its odd ones: bytes become words by shifts alone
// (codes.inl).
alignas(32) constexpr uint8_t order[32] = {0,  2,  4,  6,  8,  10, 12, 14, 1,  3,  5,
                                           7,  9,  11, 13, 15, 16, 18, 20, 22, 24, 26,
                                           28, 30, 17, 19, 21, 23, 25, 27, 29, 31};
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
static inline F set1(float v) { return _mm512_set1_ps(v); }
static inline F zero() { return _mm512_setzero_ps(); }
static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// The sign of lane i is flipped where bit i of the low L bits is set.
static inline F flip(F v, uint32_t bits) {
  const __m512i s = _mm512_maskz_set1_epi32(static_cast<__mmask16>(bits), INT32_MIN);
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), s));
}
static inline F from_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline F from_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline F from_i32(const int32_t* p) {
  return _mm512_cvtepi32_ps(_mm512_loadu_si512(reinterpret_cast<const void*>(p)));
}
// Lanes i and i+8, i+4, i+2, i+1 in turn: the order is part of the contract of `tile`.
static inline float sum(F v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v),
                                 _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

using I = __m512i;
static inline I load_i(const int16_t* p) { return _mm512_loadu_si512(p); }
static inline I zero_i() { return _mm512_setzero_si512(); }
static inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }
static inline I dot_add(I acc, I a, I b) {
#if defined(EDGEES_ARM_VNNI)
  return _mm512_dpwssd_epi32(acc, a, b);
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
}
// acc + x w for one pair of weights and L columns (layout: `interleave`).
EDGEES_INLINE I pair_add(I acc, I x, const int16_t* w) {
#if defined(EDGEES_ARM_VNNI)  // compilers copy the accumulator around and broadcast apart
  const int32_t* pair = reinterpret_cast<const int32_t*>(w);
  __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(x), "m"(*pair));
  return acc;
#else
  int32_t pair;
  memcpy(&pair, w, 4);
  return dot_add(acc, x, _mm512_set1_epi32(pair));
#endif
}
// Lane sums are the dot of 32 numbers, those of a half that of 16.
static inline I dot_32(const int16_t* w, const int16_t* x) {
  return dot_add(zero_i(), load_i(w), load_i(x));
}
static inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
// Quarter k of four[j]: that of v[4 j..], the four lanes of each joined.
template <I (*join)(I, I)>
static inline void across_quarters(const I* v, I* four) {
  for (int k = 0; k < 4; ++k) {
    const I* p = v + 4 * k;
    const I a = join(_mm512_unpacklo_epi32(p[0], p[1]), _mm512_unpackhi_epi32(p[0], p[1]));
    const I b = join(_mm512_unpacklo_epi32(p[2], p[3]), _mm512_unpackhi_epi32(p[2], p[3]));
    four[k] = join(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
}
// Lane r: all lanes of v[r] joined.
template <I (*join)(I, I)>
static inline I across(const I* v) {
  I four[4];
  across_quarters<join>(v, four);
  const I a = join(_mm512_shuffle_i32x4(four[0], four[1], 0x44),
                   _mm512_shuffle_i32x4(four[0], four[1], 0xEE));
  const I b = join(_mm512_shuffle_i32x4(four[2], four[3], 0x44),
                   _mm512_shuffle_i32x4(four[2], four[3], 0xEE));
  return join(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
}
static inline I lane_sums(const I* v) { return across<add_i>(v); }
static inline I join_quarters(I a, I b) {
  return add_i(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
}
// Lane r: the first eight lanes of v[r], and the last.
static inline void half_sums(const I* v, I* first, I* last) {
  I four[4];
  across_quarters<add_i>(v, four);
  *first = join_quarters(_mm512_shuffle_i32x4(four[0], four[1], 0x44),
                         _mm512_shuffle_i32x4(four[2], four[3], 0x44));
  *last = join_quarters(_mm512_shuffle_i32x4(four[0], four[1], 0xEE),
                        _mm512_shuffle_i32x4(four[2], four[3], 0xEE));
}
#elif defined(EDGEES_ARM_AVX2)
using F = __m256;
constexpr int L = 8;
constexpr const uint8_t* order = kNaturalOrder;
static inline F load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
static inline F set1(float v) { return _mm256_set1_ps(v); }
static inline F zero() { return _mm256_setzero_ps(); }
static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F flip(F v, uint32_t bits) {
  const __m256i place = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256i s =
      _mm256_and_si256(_mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(bits)), place),
                       _mm256_set1_epi32(INT32_MIN));
  return _mm256_xor_ps(v, _mm256_castsi256_ps(s));
}
static inline F from_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline F from_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline F from_i32(const int32_t* p) {
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline float sum(F a) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

using I = __m256i;
static inline I load_i(const int16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
static inline I zero_i() { return _mm256_setzero_si256(); }
static inline F to_float(I v) { return _mm256_cvtepi32_ps(v); }
static inline I dot_add(I acc, I a, I b) {
#if defined(EDGEES_ARM_VNNI)  // written out as above; compilers' names for it came late
  __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
#else
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
#endif
}
static inline I pair_add(I acc, I x, const int16_t* w) {
  int32_t pair;
  memcpy(&pair, w, 4);
  return dot_add(acc, x, _mm256_set1_epi32(pair));
}
static inline I dot_16(const int16_t* w, const int16_t* x) {
  return _mm256_madd_epi16(load_i(w), load_i(x));
}
static inline I dot_32(const int16_t* w, const int16_t* x) {
  return dot_add(dot_16(w, x), load_i(w + 16), load_i(x + 16));
}
// Lane r: all lanes of v[r].
static inline I lane_sums(const I* v) {
  const I a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  const I b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                          _mm256_permute2x128_si256(a, b, 0x31));
}
#elif defined(EDGEES_ARM_NEON)
using F = float32x4_t;
constexpr int L = 4;
constexpr const uint8_t* order = kNaturalOrder;
static inline F load(const float* p) { return vld1q_f32(p); }
static inline void store(float* p, F v) { vst1q_f32(p, v); }
static inline F set1(float v) { return vdupq_n_f32(v); }
static inline F zero() { return vdupq_n_f32(0.0f); }
static inline F add(F a, F b) { return vaddq_f32(a, b); }
static inline F sub(F a, F b) { return vsubq_f32(a, b); }
static inline F mul(F a, F b) { return vmulq_f32(a, b); }
static inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
static inline F flip(F v, uint32_t bits) {
  static const int32_t place[4] = {31, 30, 29, 28};
  const uint32x4_t s =
      vandq_u32(vshlq_u32(vdupq_n_u32(bits), vld1q_s32(place)), vdupq_n_u32(0x80000000u));
  return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), s));
}
static inline F from_u8(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, 4);
  const uint16x8_t h = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(word)));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(h)));
}
static inline F from_i8(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  const int16x8_t h = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(h)));
}
static inline F from_i32(const int32_t* p) { return vcvtq_f32_s32(vld1q_s32(p)); }
static inline float sum(F a) {
  const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}

using I = int32x4_t;
static inline int16x8_t load_i(const int16_t* p) { return vld1q_s16(p); }
static inline I zero_i() { return vdupq_n_s32(0); }
static inline F to_float(I v) { return vcvtq_f32_s32(v); }
// Here a pair's first numbers of all columns lie before its second ones.
static inline I pair_add(I acc, int16x8_t x, const int16_t* w) {
  return vmlal_n_s16(vmlal_n_s16(acc, vget_low_s16(x), w[0]), vget_high_s16(x), w[1]);
}
static inline I dot_8(I acc, const int16_t* w, const int16_t* x) {
  const int16x8_t a = load_i(w), b = load_i(x);
  return vmlal_s16(vmlal_s16(acc, vget_low_s16(a), vget_low_s16(b)), vget_high_s16(a),
                   vget_high_s16(b));
}
static inline I dot_16(const int16_t* w, const int16_t* x) {
  return dot_8(dot_8(zero_i(), w, x), w + 8, x + 8);
}
static inline I dot_32(const int16_t* w, const int16_t* x) {
  return dot_8(dot_8(dot_16(w, x), w + 16, x + 16), w + 24, x + 24);
}
static inline I lane_sums(const I* v) {
  return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}
#endif
