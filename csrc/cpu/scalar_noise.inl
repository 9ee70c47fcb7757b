// Noise kernels in plain C++: the specification. Included inside scalar.cpp's namespace.
static void philox(uint64_t key, uint32_t row, uint32_t tensor, uint32_t stream, uint32_t first,
                   int64_t n, uint32_t* out) {
  for (int64_t b = 0; b < n; ++b) {
    const Words4 r =
        philox4x32<kNoiseRounds>(key, first + static_cast<uint32_t>(b), row, tensor, stream);
    memcpy(out + 4 * b, r.w, sizeof r.w);
  }
}

static void add_signs(float* row, int64_t n, const uint32_t* words, float amp) {
  const float by[2] = {amp,
                       -amp};  // a look-up, because a branch would be guessed wrong half the time
  for (int64_t j = 0; j < n; ++j) row[j] += by[sign_bit(words, j)];
}

static void add_normals(float* row, int64_t n, const uint32_t* words, float amp) {
  for (int64_t j = 0; j < n; ++j) {
    row[j] += amp * static_cast<float>(normal_integer(kNormalTable, half_word(words, j)));
  }
}

// L partial sums, element j to sum j % L; folded i with i + L/2, then halved; the rest in order.
static float sign_dot(const uint32_t* words, const float* x, int64_t n) {
  const float by[2] = {1, -1};
  float acc[L] = {};
  int64_t j = 0;
  for (; j + L <= n; j += L) {
    for (int i = 0; i < L; ++i) acc[i] += by[sign_bit(words, j + i)] * x[j + i];
  }
  for (int half = L / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) acc[i] += acc[i + half];
  }
  float total = acc[0];
  for (; j < n; ++j) total += by[sign_bit(words, j)] * x[j];
  return total;
}

static void decay_add(float* delta, const float* acc, int64_t n, float keep) {
  for (int64_t j = 0; j < n; ++j) delta[j] = keep * delta[j] + acc[j];
}
