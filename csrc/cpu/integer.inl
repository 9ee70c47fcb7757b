// Activations as integers and products of both, for the vector arms; scalar_integer.inl says what
// they compute.
#if defined(EDGEES_ARM_AVX512)
// Sixteen groups at a time, so that they share their sums across lanes.
static void quantize(const float* x, int64_t n, int16_t* q, float* scale, float* sum) {
  const I mask = _mm512_set1_epi32(INT32_MAX);
  const I evens_odds = _mm512_zextsi256_si512(  // low words in `order`
      _mm256_setr_epi16(0, 4, 8, 12, 16, 20, 24, 28, 2, 6, 10, 14, 18, 22, 26, 30));
  for (int64_t i = 0; i < n; i += L * kGroup, scale += L, sum += L) {
    const int some = static_cast<int>(n - i < L * kGroup ? (n - i) / kGroup : L);
    I v[L] = {};
    for (int g = 0; g < some; ++g) {
      const float* p = x + i + g * kGroup;
      v[g] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(load(p)), mask),
                              _mm512_and_si512(_mm512_castps_si512(load(p + 16)), mask));
    }
    // step_of, sixteen times
    const I exponent = _mm512_srli_epi32(across<max_i>(v), 23);
    const I e = _mm512_max_epi32(exponent, _mm512_set1_epi32(14));
    const __mmask16 finite = _mm512_cmplt_epi32_mask(exponent, _mm512_set1_epi32(255));
    const I up = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(13)), 23);
    const I down = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254 + 13), e), 23);
    const F step =
        _mm512_castsi512_ps(_mm512_mask_blend_epi32(finite, _mm512_set1_epi32(0x7FC00000), up));
    alignas(64) float inverse[L];
    store(inverse, _mm512_castsi512_ps(_mm512_maskz_mov_epi32(finite, down)));
    for (int g = 0; g < some; ++g) {
      const float* p = x + i + g * kGroup;
      int16_t* to = q + i + g * kGroup;
      const F by = set1(inverse[g]);
      const I a = _mm512_cvtps_epi32(mul(load(p), by)),
              b = _mm512_cvtps_epi32(mul(load(p + 16), by));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                          _mm512_castsi512_si256(_mm512_permutexvar_epi16(evens_odds, a)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16),
                          _mm512_castsi512_si256(_mm512_permutexvar_epi16(evens_odds, b)));
      v[g] = _mm512_add_epi32(a, b);
    }
    const __mmask16 there = static_cast<__mmask16>((1u << some) - 1);
    _mm512_mask_storeu_ps(scale, there, step);
    _mm512_mask_storeu_ps(sum, there, mul(step, to_float(lane_sums(v))));
  }
}
#else
static void quantize(const float* x, int64_t n, int16_t* q, float* scale, float* sum) {
  for (int64_t i = 0; i < n; i += kGroup, ++scale, ++sum) {
#if defined(EDGEES_ARM_AVX2)
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
#if defined(EDGEES_ARM_AVX2)
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
#endif

static void interleave(const int16_t* q, int64_t ld, int columns, int64_t n, int16_t* panel) {
#if defined(EDGEES_ARM_NEON)
  for (int64_t i = 0; i < n; i += 2, panel += 2 * L)
    for (int c = 0; c < L; ++c)
      for (int k = 0; k < 2; ++k) panel[k * L + c] = c < columns ? q[c * ld + i + k] : int16_t{0};
#else
#if defined(EDGEES_ARM_AVX512)
  // A group of sixteen columns is a square of pairs, which is transposed.
  for (int64_t i = 0; i < n; i += kGroup, panel += kGroup * L) {
    I v[L], w[L];
    for (int c = 0; c < L; ++c) v[c] = c < columns ? load_i(q + c * ld + i) : zero_i();
    for (int c = 0; c < L; c += 2) {
      w[c] = _mm512_unpacklo_epi32(v[c], v[c + 1]);
      w[c + 1] = _mm512_unpackhi_epi32(v[c], v[c + 1]);
    }
    for (int c = 0; c < L; c += 4) {
      v[c] = _mm512_unpacklo_epi64(w[c], w[c + 2]);
      v[c + 1] = _mm512_unpackhi_epi64(w[c], w[c + 2]);
      v[c + 2] = _mm512_unpacklo_epi64(w[c + 1], w[c + 3]);
      v[c + 3] = _mm512_unpackhi_epi64(w[c + 1], w[c + 3]);
    }
    for (int k = 0; k < 4; ++k) {  // v[4 c + k]: pairs k, k + 4, ... of columns 4 c..
      const I a = _mm512_shuffle_i32x4(v[k], v[k + 4], 0x88);
      const I b = _mm512_shuffle_i32x4(v[k], v[k + 4], 0xDD);
      const I c = _mm512_shuffle_i32x4(v[k + 8], v[k + 12], 0x88);
      const I d = _mm512_shuffle_i32x4(v[k + 8], v[k + 12], 0xDD);
      const auto put = [&](int pair, I x) { _mm512_storeu_si512(panel + pair * 2 * L, x); };
      put(k, _mm512_shuffle_i32x4(a, c, 0x88));
      put(k + 4, _mm512_shuffle_i32x4(b, d, 0x88));
      put(k + 8, _mm512_shuffle_i32x4(a, c, 0xDD));
      put(k + 12, _mm512_shuffle_i32x4(b, d, 0xDD));
    }
  }
#else
  const int32_t* from = reinterpret_cast<const int32_t*>(q);
  alignas(32) int32_t lanes[L], some[L];
  for (int c = 0; c < L; ++c) {
    lanes[c] = static_cast<int32_t>(c * (ld / 2));
    some[c] = c < columns ? -1 : 0;
  }
  const __m256i at = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes));
  const __m256i mask = _mm256_load_si256(reinterpret_cast<const __m256i*>(some));
  for (int64_t i = 0; i < n / 2; ++i, panel += 2 * L)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel),
                        _mm256_mask_i32gather_epi32(zero_i(), from + i, at, mask, 4));
#endif
#endif
}

static void signs(const uint32_t* words, int64_t n, int16_t* q) {
#if defined(EDGEES_ARM_AVX512)
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i at =
      _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(order)));
  for (int64_t j = 0; j < n; j += 32) {
    const __m512i v = _mm512_mask_sub_epi16(one, words[j >> 5], zero_i(), one);
    _mm512_storeu_si512(q + j, _mm512_permutexvar_epi16(at, v));
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
  constexpr int R = 6;  // of sixteen registers: 6 sums, 6 parts, a column and a pair
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
  if (w.offsets) return panel_of<32, true>(w, add, rows, n, x, scale, sum, out);
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
      I group[kGroup / GROUP];
      const auto dots = [&](int h, I (*dot)(const int16_t*, const int16_t*), I* part) {
        for (int r = 0; r < L; ++r)  // lanes without a row repeat the first, and are dropped
          part[r] = dot(q + (r < some ? r : 0) * w.ld + i + h, x + i + h);
      };
      I part[L];
#if defined(EDGEES_ARM_AVX512)
      dots(0, dot_32, part);
      if constexpr (GROUP == 16) {
        half_sums(part, &group[0], &group[1]);
      } else {
        group[0] = lane_sums(part);
      }
#else
      for (int h = 0; h < kGroup; h += GROUP) {
        dots(h, GROUP == 32 ? dot_32 : dot_16, part);
        group[h / GROUP] = lane_sums(part);
      }
#endif
      for (const I& dot : group) {
        acc = fma(mul(to_float(dot), by), load(ws), acc);
        ws += w.stride;
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
  if (w.offsets) return column_of<32, true>(w, rows, n, x, scale, sum, y);
  column_of<32, false>(w, rows, n, x, scale, sum, y);
}

#if !defined(EDGEES_ARM_AVX512)
static bool table_column(const Rows&, int, int64_t, const int16_t*, const float*, float*) {
  return false;
}
#endif

#if defined(EDGEES_ARM_AVX512)
static bool table_column(const Rows& from, int rows, int64_t n, const int16_t* x,
                         const float* scale, float* y) {
  const Levels level = levels(levels_of(from.type));
  for (int first = 0; first < rows; first += L) {
    const int some = rows - first < L ? rows - first : L;
    const uint8_t *qs[L], *d[L];
    const TableRow row(from, first);
    for (int r = 0; r < L; ++r) {  // lanes without a row repeat the first, and are dropped
      const TableRow own(from, first + (r < some ? r : 0));
      qs[r] = own.codes;
      d[r] = own.absmax;
    }
    alignas(64) float out[L] = {}, of[L];
    memcpy(out, y + first, static_cast<size_t>(some) * sizeof(float));
    F acc = load(out);
    for (int64_t i = 0; i < n / Table4::weights; ++i) {
      const int64_t at = i * row.step, at_d = i * row.absmax_step;
      for (int r = 0; r < L; ++r) memcpy(of + r, d[r] + at_d, 4);
      const F step = mul(load(of), set1(power_of_two(-kTableBits)));
      for (int h = 0; h < 2; ++h) {
        const auto numbers = load_i(x + i * Table4::weights + 32 * h);
        I part[L];
        for (int r = 0; r < L; ++r) {
          if (h) __builtin_prefetch(qs[r] + at + 8 * row.step);
          part[r] = dot_add(zero_i(), level_words(qs[r] + at + 16 * h, level), numbers);
        }
        acc = fma(mul(to_float(lane_sums(part)), set1(scale[2 * i + h])), step, acc);
      }
    }
    store(out, acc);
    memcpy(y + first, out, static_cast<size_t>(some) * sizeof(float));
  }
  return true;
}

// Sums of four integers with all choices of signs fill a register: an entry for each nibble of a
// word, looked up for sixteen rows at once.
static void sign_table(const int16_t* x, int64_t n, int32_t* table) {
  static const __mmask16 minus[4] = {0xAAAA, 0xCCCC, 0xF0F0, 0xFF00};
  for (int64_t g = 0; g < n; g += kGroup) {
    int32_t natural[kGroup];
    for (int i = 0; i < kGroup; ++i) natural[order[i]] = x[g + i];
    for (int i = 0; i < kGroup; i += 4, table += L) {
      I sum = zero_i();
      for (int k = 0; k < 4; ++k) {
        const I v = _mm512_set1_epi32(natural[i + k]);
        sum = _mm512_add_epi32(sum, _mm512_mask_sub_epi32(v, minus[k], zero_i(), v));
      }
      _mm512_storeu_si512(table, sum);
    }
  }
}

template <int COLUMNS>
static void sign_columns_of(uint64_t key, uint32_t tensor, const uint32_t* rows, int count,
                            int64_t n, const SignColumn* columns, float c) {
  alignas(64) uint64_t halves[2][8];  // even and odd rows
  for (int r = 0; r < kSignRows; ++r) halves[r % 2][r / 2] = rows[r < count ? r : 0];
  const Philox a(key, _mm512_load_si512(halves[0]), tensor, kStreamSign);
  const U odd_rows = _mm512_load_si512(halves[1]);
  F acc[COLUMNS];
  for (F& v : acc) v = zero();
  for (int64_t j = 0; j < n; j += 128) {
    const U block = splat(static_cast<uint32_t>(j / 128));
    const Philox::State p = a.run(block, a.row), q = a.run(block, odd_rows);
    const I words[4] = {_mm512_mask_blend_epi32(0xAAAA, p.c0, _mm512_slli_epi64(q.c0, 32)),
                        _mm512_mask_blend_epi32(0xAAAA, p.c1, _mm512_slli_epi64(q.c1, 32)),
                        _mm512_mask_blend_epi32(0xAAAA, p.c2, _mm512_slli_epi64(q.c2, 32)),
                        _mm512_mask_blend_epi32(0xAAAA, p.c3, _mm512_slli_epi64(q.c3, 32))};
    const int64_t groups = n - j < 128 ? (n - j) / kGroup : 4;
    for (int64_t g = 0; g < groups; ++g) {
      I part[COLUMNS];
      for (I& v : part) v = zero_i();
      I word = words[g];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i, word = _mm512_srli_epi32(word, 4))
        for (int k = 0; k < COLUMNS; ++k) {
          const int32_t* table = columns[k].table + (j + g * kGroup + 4 * i) * 4;
          part[k] =
              _mm512_add_epi32(part[k], _mm512_permutexvar_epi32(word, _mm512_loadu_si512(table)));
        }
      for (int k = 0; k < COLUMNS; ++k) {
        const F by = set1(columns[k].scale[j / kGroup + g]);
        acc[k] = fma(mul(to_float(part[k]), by), set1(c), acc[k]);
      }
    }
  }
  const __mmask16 there = static_cast<__mmask16>((1u << count) - 1);
  for (int k = 0; k < COLUMNS; ++k) _mm512_mask_storeu_ps(columns[k].y, there, acc[k]);
}

static void sign_columns(uint64_t key, uint32_t tensor, const uint32_t* rows, int count, int64_t n,
                         const SignColumn* columns, int columns_count, float c) {
  while (columns_count >= 4) {
    sign_columns_of<4>(key, tensor, rows, count, n, columns, c);
    columns += 4;
    columns_count -= 4;
  }
  if (!columns_count) return;
  (columns_count == 3   ? sign_columns_of<3>
   : columns_count == 2 ? sign_columns_of<2>
                        : sign_columns_of<1>)(key, tensor, rows, count, n, columns, c);
}
#else
static void sign_table(const int16_t* x, int64_t n, int32_t* table) {
  memcpy(table, x, static_cast<size_t>(n) * sizeof *x);
}

static void sign_columns(uint64_t key, uint32_t tensor, const uint32_t* rows, int count, int64_t n,
                         const SignColumn* columns, int columns_count, float c) {
  constexpr int64_t kPiece = 512;
  alignas(64) int16_t q[kSignRows * kPiece];
  float scale[kPiece / kGroup * kSignRows];
  for (float& v : scale) v = c;
  const Codes16 w{q, kPiece, scale, scale, false, kSignRows, kGroup};
  for (int k = 0; k < columns_count; ++k)
    for (int r = 0; r < count; ++r) columns[k].y[r] = 0.0f;
  for (int64_t j = 0; j < n; j += kPiece) {
    const int64_t width = n - j < kPiece ? n - j : kPiece;
    for (int r = 0; r < count; ++r) {
      uint32_t words[kPiece / 32];
      philox(key, rows[r], tensor, kStreamSign, static_cast<uint32_t>(j / 128), (width + 127) / 128,
             words);
      signs(words, width, q + r * kPiece);
    }
    for (int k = 0; k < columns_count; ++k)
      column(w, count, width, reinterpret_cast<const int16_t*>(columns[k].table) + j,
             columns[k].scale + j / kGroup, nullptr, columns[k].y);
  }
}
#endif
