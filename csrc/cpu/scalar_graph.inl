// The other operations of a transformer: the specification.
static void to_half(const float* x, int64_t n, uint16_t* y) {
  for (int64_t j = 0; j < n; ++j) y[j] = half_of(x[j]);
}

static void rms_norm(const float* x, int64_t n, float eps, float* y) {
  double total = 0;
  for (int64_t j = 0; j < n; ++j) total += static_cast<double>(x[j]) * x[j];
  const float by = 1.0f / std::sqrt(static_cast<float>(total / static_cast<double>(n)) + eps);
  for (int64_t j = 0; j < n; ++j) y[j] = x[j] * by;
}

static void swiglu(const float* x, const float* g, int64_t n, float* y) {
  for (int64_t j = 0; j < n; ++j) y[j] = x[j] / (1.0f + std::exp(-x[j])) * g[j];
}

static void attend(const Attend& a) {
  for (int h = 0; h < a.heads; ++h) {
    float* s = a.scores + h * a.room;
    float top = a.sink ? a.sink[h] : -INFINITY;
    for (int64_t c = 0; c < a.cells; ++c) {
      double dot = 0;
      for (int64_t d = 0; d < a.dk; ++d) {
        dot += static_cast<double>(half_to_float(a.k[c * a.k_stride + d])) * a.q[h][d];
      }
      float v = static_cast<float>(dot) * a.scale;
      if (a.softcap != 0.0f) v = a.softcap * std::tanh(v / a.softcap);
      if (a.mask) {
        v = a.mask[c] == kMinusInfinity
                ? -INFINITY
                : v + (a.slope ? a.slope[h] : 1.0f) * half_to_float(a.mask[c]);
      }
      s[c] = v;
      top = v > top ? v : top;
    }
    double total = a.sink ? std::exp(a.sink[h] - top) : 0.0;
    for (int64_t c = 0; c < a.cells; ++c) {
      s[c] = std::exp(s[c] - top);
      total += s[c];
    }
    for (int64_t d = 0; d < a.dv; ++d) {
      double value = 0;
      for (int64_t c = 0; c < a.cells; ++c) {
        if (s[c] != 0.0f) {
          value += static_cast<double>(s[c]) * half_to_float(a.v[c * a.v_stride + d]);
        }
      }
      a.out[h][d] = static_cast<float>(value / total);
    }
  }
}
