// Tiles of a product: one accumulator of L lanes for every (row, column), walked from the first
// weight to the last, so that neither the batch nor the tiling shows in the result.
template <int R, int C>
EDGEES_INLINE void micro(const float* w, int64_t ldw, int64_t n, const float* const* x,
                         float* const* y, int row) {
  F acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = zero();
  int64_t i = 0;
  for (; i + L <= n; i += L) {
    F v[C];
    for (int c = 0; c < C; ++c) v[c] = load(x[c] + i);
    for (int r = 0; r < R; ++r) {
      const F a = load(w + r * ldw + i);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(a, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float total = sum(acc[r][c]);
      for (int64_t j = i; j < n; ++j) total = std::fma(w[r * ldw + j], x[c][j], total);
      y[c][row + r] = total;
    }
}

template <int R, int C>
EDGEES_INLINE void strip(const float* w, int64_t ldw, int rows, int64_t n, const float* const* x,
                         float* const* y) {
  int r = 0;
  for (; r + R <= rows; r += R) micro<R, C>(w + r * ldw, ldw, n, x, y, r);
  for (; r < rows; ++r) micro<1, C>(w + r * ldw, ldw, n, x, y, r);
}

void tile(const float* w, int64_t ldw, int rows, int64_t n, const float* const* x, int cols,
          float* const* y) {
#if defined(EDGEES_ARM_AVX2)
  constexpr int WIDE = 3;  // sixteen registers: 4 x 3 sums, 3 columns, 1 row
#else
  constexpr int WIDE = 6;  // thirty-two: 4 x 6 sums, 6 columns, 1 row
#endif
  int c = 0;
  for (; c + WIDE <= cols; c += WIDE) strip<4, WIDE>(w, ldw, rows, n, x + c, y + c);
  switch (cols - c) {
    case 5:
      strip<4, 5>(w, ldw, rows, n, x + c, y + c);
      break;
    case 4:
      strip<4, 4>(w, ldw, rows, n, x + c, y + c);
      break;
    case 3:
      strip<4, 3>(w, ldw, rows, n, x + c, y + c);
      break;
    case 2:
      strip<4, 2>(w, ldw, rows, n, x + c, y + c);
      break;
    case 1:
      strip<8, 1>(w, ldw, rows, n, x + c, y + c);
      break;
    default:
      break;
  }
}
