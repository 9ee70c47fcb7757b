// The other operations of a transformer, so that a whole graph stays in one backend. Each result is
// a function of its own row alone: neither company nor padding nor threads show in it.
#if defined(EDGEES_ARM_AVX512)
static inline F max_f(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min_f(F a, F b) { return _mm512_min_ps(a, b); }
static inline F div_f(F a, F b) { return _mm512_div_ps(a, b); }
static inline F round_f(F a) { return _mm512_roundscale_ps(a, 8); }
static inline F power_f(F n) {  // 2^n for whole numbers -127..127 (0 at -127)
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
static inline F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void store_half(uint16_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, 0));
}
static inline F sums(const F* v) {  // lane r: the sum of all lanes of v[r], in one order
  F four[4];
  for (int k = 0; k < 4; ++k) {
    const F* p = v + 4 * k;
    const F a = add(_mm512_unpacklo_ps(p[0], p[1]), _mm512_unpackhi_ps(p[0], p[1]));
    const F b = add(_mm512_unpacklo_ps(p[2], p[3]), _mm512_unpackhi_ps(p[2], p[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    four[k] =
        add(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  const F a = add(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                  _mm512_shuffle_f32x4(four[0], four[1], 0xEE));
  const F b = add(_mm512_shuffle_f32x4(four[2], four[3], 0x44),
                  _mm512_shuffle_f32x4(four[2], four[3], 0xEE));
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
#elif defined(EDGEES_ARM_AVX2)
static inline F max_f(F a, F b) { return _mm256_max_ps(a, b); }
static inline F min_f(F a, F b) { return _mm256_min_ps(a, b); }
static inline F div_f(F a, F b) { return _mm256_div_ps(a, b); }
static inline F round_f(F a) { return _mm256_round_ps(a, 8); }
static inline F power_f(F n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
static inline F load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline void store_half(uint16_t* p, F v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, 0));
}
static inline F sums(const F* v) {
  const F a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const F b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
#elif defined(EDGEES_ARM_NEON)
static inline F max_f(F a, F b) { return vmaxq_f32(a, b); }
static inline F min_f(F a, F b) { return vminq_f32(a, b); }
static inline F div_f(F a, F b) { return vdivq_f32(a, b); }
static inline F round_f(F a) { return vrndnq_f32(a); }
static inline F power_f(F n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline F load_half(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline void store_half(uint16_t* p, F v) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
}
static inline F sums(const F* v) {
  return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
}
#endif

// e^x: x = n ln 2 + r, a polynomial in r, times 2^n; 0 below -87.7. Relative error below 1e-7.
static inline F exp_f(F x) {
  x = max_f(min_f(x, set1(88.0f)), set1(-88.0f));
  const F n = round_f(mul(x, set1(1.44269504f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return mul(p, power_f(n));
}

// A short last vector, filled up with zeros.
static inline F load_some(const float* p, int64_t n) {
  alignas(64) float room[L] = {};
  memcpy(room, p, static_cast<size_t>(n) * sizeof(float));
  return load(room);
}
static inline F load_some(const uint16_t* p, int64_t n) {
  alignas(64) uint16_t room[L] = {};
  memcpy(room, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_half(room);
}

static void to_half(const float* x, int64_t n, uint16_t* y) {
  int64_t j = 0;
  for (; j + L <= n; j += L) store_half(y + j, load(x + j));
  if (j < n) {
    alignas(64) uint16_t room[L];
    store_half(room, load_some(x + j, n - j));
    memcpy(y + j, room, static_cast<size_t>(n - j) * sizeof(uint16_t));
  }
}

static void rms_norm(const float* x, int64_t n, float eps, float* y) {
  F acc = zero();
  int64_t j = 0;
  for (; j + L <= n; j += L) acc = fma(load(x + j), load(x + j), acc);
  if (j < n) acc = fma(load_some(x + j, n - j), load_some(x + j, n - j), acc);
  const float by = 1.0f / std::sqrt(sum(acc) / static_cast<float>(n) + eps);
  for (j = 0; j + L <= n; j += L) store(y + j, mul(load(x + j), set1(by)));
  for (; j < n; ++j) y[j] = x[j] * by;
}

static inline F silu(F x) { return div_f(x, add(set1(1.0f), exp_f(sub(zero(), x)))); }
static void swiglu(const float* x, const float* g, int64_t n, float* y) {
  int64_t j = 0;
  for (; j + L <= n; j += L) store(y + j, mul(silu(load(x + j)), load(g + j)));
  if (j < n) {
    alignas(64) float room[L];
    store(room, mul(silu(load_some(x + j, n - j)), load_some(g + j, n - j)));
    memcpy(y + j, room, static_cast<size_t>(n - j) * sizeof(float));
  }
}

// Scores of L cells for every head: part[h][cell] are the lane sums still to be folded.
static void cell_scores(const Attend& a, int64_t first, int64_t some) {
  alignas(64) F part[kAttendHeads][L];
  for (int64_t c = 0; c < L; ++c) {
    if (c >= some) {
      for (int h = 0; h < a.heads; ++h) part[h][c] = zero();
      continue;
    }
    const uint16_t* k = a.k + (first + c) * a.k_stride;
    F acc[kAttendHeads];
    for (int h = 0; h < a.heads; ++h) acc[h] = zero();
    int64_t d = 0;
    for (; d + L <= a.dk; d += L) {
      const F v = load_half(k + d);
      for (int h = 0; h < a.heads; ++h) acc[h] = fma(v, load(a.q[h] + d), acc[h]);
    }
    if (d < a.dk) {
      const F v = load_some(k + d, a.dk - d);
      for (int h = 0; h < a.heads; ++h) acc[h] = fma(v, load_some(a.q[h] + d, a.dk - d), acc[h]);
    }
    for (int h = 0; h < a.heads; ++h) part[h][c] = acc[h];
  }
  for (int h = 0; h < a.heads; ++h) store(a.scores + h * a.room + first, sums(part[h]));
}

// out[d..] = sum over cells of score * v, for H heads and D vectors.
template <int H, int D>
EDGEES_INLINE void weigh(const Attend& a, int head, int64_t d, const float* by) {
  F acc[H][D];
  for (int h = 0; h < H; ++h)
    for (int k = 0; k < D; ++k) acc[h][k] = zero();
  const float* s = a.scores + head * a.room;
  const uint16_t* v = a.v + d;
  for (int64_t c = 0; c < a.cells; ++c, v += a.v_stride) {
    if (a.mask && a.mask[c] == kMinusInfinity) continue;
    F x[D];
    for (int k = 0; k < D; ++k) x[k] = load_half(v + k * L);
    for (int h = 0; h < H; ++h) {
      const F p = set1(s[h * a.room + c]);
      for (int k = 0; k < D; ++k) acc[h][k] = fma(p, x[k], acc[h][k]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int k = 0; k < D; ++k) {
      store(a.out[head + h] + d + k * L, mul(acc[h][k], set1(by[head + h])));
    }
}
template <int H>
EDGEES_INLINE void weigh_heads(const Attend& a, int head, const float* by) {
  int64_t d = 0;
  for (; d + 4 * L <= a.dv; d += 4 * L) weigh<H, 4>(a, head, d, by);
  for (; d + L <= a.dv; d += L) weigh<H, 1>(a, head, d, by);
  for (; d < a.dv; ++d)
    for (int h = head; h < head + H; ++h) {
      float total = 0.0f;
      for (int64_t c = 0; c < a.cells; ++c) {
        if (a.mask && a.mask[c] == kMinusInfinity) continue;
        total = std::fma(a.scores[h * a.room + c], half_to_float(a.v[c * a.v_stride + d]), total);
      }
      a.out[h][d] = total * by[h];
    }
}

static void attend(const Attend& a) {
  for (int64_t c = 0; c < a.cells; c += L) {
    cell_scores(a, c, a.cells - c < L ? a.cells - c : L);
  }
  float by[kAttendHeads];
  for (int h = 0; h < a.heads; ++h) {
    float* s = a.scores + h * a.room;
    const float slope = a.slope ? a.slope[h] : 1.0f;
    float top = a.sink ? a.sink[h] : -INFINITY;
    for (int64_t c = 0; c < a.cells; ++c) {
      float v = s[c] * a.scale;
      if (a.softcap != 0.0f) v = a.softcap * std::tanh(v / a.softcap);
      if (a.mask) {
        v = a.mask[c] == kMinusInfinity ? -INFINITY : v + slope * half_to_float(a.mask[c]);
      }
      s[c] = v;
      top = v > top ? v : top;
    }
    F total = zero();
    for (int64_t c = 0; c < a.cells; c += L) {
      F p = exp_f(sub(load(s + c), set1(top)));
      if (a.cells - c < L) {
        store(s + c, p);
        for (int64_t k = a.cells - c; k < L; ++k) s[c + k] = 0.0f;
        p = load(s + c);
      }
      store(s + c, p);
      total = add(total, p);
    }
    float all = sum(total);
    if (a.sink) all += std::exp(a.sink[h] - top);
    by[h] = 1.0f / all;
  }
  int h = 0;
  for (; h + 3 <= a.heads; h += 3) weigh_heads<3>(a, h, by);
  for (; h + 2 <= a.heads; h += 2) weigh_heads<2>(a, h, by);
  for (; h < a.heads; ++h) weigh_heads<1>(a, h, by);
}
