// L partial sums, then their tree: the order that the vector arms of L lanes have (they fuse the
// multiply-add, hence "bounded").
void tile(const float* w, int64_t ldw, int rows, int64_t n, const float* const* x, int cols,
          float* const* y) {
  for (int c = 0; c < cols; ++c)
    for (int r = 0; r < rows; ++r) {
      const float* a = w + r * ldw;
      float part[L] = {};
      int64_t i = 0;
      for (; i + L <= n; i += L)
        for (int k = 0; k < L; ++k) part[k] += a[i + k] * x[c][i + k];
      for (int width = L / 2; width > 0; width /= 2)
        for (int k = 0; k < width; ++k) part[k] += part[k + width];
      float total = part[0];
      for (; i < n; ++i) total += a[i] * x[c][i];
      y[c][r] = total;
    }
}
