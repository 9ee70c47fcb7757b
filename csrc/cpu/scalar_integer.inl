// The specification of the integer products: exact on every arm. x is rounded to integers of at
// most 2^14 with a power of two as the step of every kGroup numbers; a row's weights are integers
// below 2^12 with a scale (and offset) for every group. Dots of a group are exact, and their scaled
// values are summed from the first group to the last, each with fused multiply-adds.
static void quantize(const float* x, int64_t n, int16_t* q, float* scale, float* sum) {
  for (int64_t i = 0; i < n; i += kGroup, ++scale, ++sum) {
    uint32_t top = 0;
    for (int k = 0; k < kGroup; ++k) {
      uint32_t bits;
      memcpy(&bits, x + i + k, 4);
      bits &= 0x7FFFFFFFu;
      top = bits > top ? bits : top;
    }
    float inverse;
    *scale = step_of(top, &inverse);
    int32_t total = 0;
    for (int k = 0; k < kGroup; ++k) {
      q[i + k] =
          inverse == 0.0f ? int16_t{0} : static_cast<int16_t>(std::lrint(x[i + k] * inverse));
      total += q[i + k];
    }
    *sum = *scale * static_cast<float>(total);
  }
}

static void interleave(const int16_t* q, int64_t ld, int columns, int64_t n, int16_t* panel) {
  for (int64_t i = 0; i < n; i += 2, panel += 2 * L)
    for (int c = 0; c < L; ++c)
      for (int k = 0; k < 2; ++k) panel[2 * c + k] = c < columns ? q[c * ld + i + k] : int16_t{0};
}

// Values of a table as integers, and the plane's steps in the same unit.
static void table_codes(const Rows& from, int rows, int64_t n, const Codes16& to) {
  const int16_t* level = levels_of(from.type);
  const int bits = from.bits, middle = bits ? 1 << (bits - 1) : 0;
  const int step = 1 << (kTableBits - kTableCellBits + from.span - bits);
  for (int r = 0; r < rows; ++r) {
    const TableRow row(from, r);
    float* scale = to.scale + r;
    for (int64_t i = 0; i < n; i += kGroup, scale += to.stride) {
      const float d = row.d(i / Table4::weights);
      const uint8_t* qs = row.qs(i / Table4::weights);
      *scale = d * power_of_two(-kTableBits);
      uint8_t steps[kGroup];
      if (bits) {
        unpack_plane(bits, from.plane + r * from.plane_stride + i / 32 * 4 * bits, steps);
      }
      for (int k = 0; k < kGroup; ++k) {
        const uint8_t both = qs[(i % Table4::weights + k) / 2];
        const int move = bits ? (steps[k] - middle) * step : 0;
        to.q[r * to.ld + i + k] = static_cast<int16_t>(level[k % 2 ? both & 15 : both >> 4] +
                                                       (std::signbit(d) ? -move : move));
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
    constexpr int groups = Block::weights / Block::group;
    const int bits = from.bits, middle = bits ? 1 << (bits - 1) : 0;
    for (int r = 0; r < rows; ++r) {
      const Block* b = reinterpret_cast<const Block*>(from.base + r * from.base_stride);
      float *scale = to.scale + r, *offset = to.offset + r;
      for (int64_t i = 0; i < n; ++b) {
        int8_t room[Block::weights];
        float s[groups], o[groups] = {};
        b->scales(PlainHalf(), s, o);
        const int8_t* c = b->unpack(room);
        for (int g = 0; g < groups; ++g, scale += to.stride, offset += to.stride) {
          *scale = s[g] * power_of_two(-bits);
          if (Block::offset) *offset = o[g];
        }
        for (int k = 0; k < Block::weights; ++k, ++i) {
          int move = 0;
          if (bits) {
            uint8_t step[32];
            unpack_plane(bits, from.plane + r * from.plane_stride + i / 32 * 4 * bits, step);
            move = (step[i % 32] - middle) * (1 << from.span);
          }
          to.q[r * to.ld + i] = static_cast<int16_t>(
              c[k] * (1 << bits) + (std::signbit(s[k / Block::group]) ? -move : move));
        }
      }
    }
  });
}

static void signs(const uint32_t* words, int64_t n, int16_t* q) {
  for (int64_t j = 0; j < n; ++j)
    q[j] = static_cast<int16_t>(1 - 2 * (words[j >> 5] >> (j & 31) & 1));
}

// One number of a product; column c of a panel, or a column that lies by itself (width 1).
static float integer_dot(const Codes16& w, int64_t row, int64_t n, const int16_t* x,
                         const float* scale, const float* sum, int c, int width, float acc) {
  int64_t g = 0;
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t block = i / kGroup * width + c;
    for (int h = 0; h < kGroup; h += w.group, ++g) {
      int32_t part = 0;
      for (int k = 0; k < w.group; ++k) {
        const int64_t j = i + h + k, at = j / 2 * 2 * width + 2 * c + j % 2;
        part += w.q[row * w.ld + j] * x[at];
      }
      acc = std::fma(static_cast<float>(part) * scale[block], w.scale[g * w.stride + row], acc);
    }
    if (w.offsets) acc = std::fma(sum[block], w.offset[i / kGroup * w.stride + row], acc);
  }
  return acc;
}

static void sign_table(const int16_t* x, int64_t n, int32_t* table) {
  for (int64_t j = 0; j < n; ++j) table[j] = x[j];
}

static void sign_columns(uint64_t key, uint32_t tensor, const uint32_t* rows, int count, int64_t n,
                         const SignColumn* columns, int columns_count, float c) {
  for (int r = 0; r < count; ++r)
    for (int k = 0; k < columns_count; ++k) {
      const SignColumn& column = columns[k];
      float acc = 0.0f;
      uint32_t words[4];
      for (int64_t j = 0; j < n; j += kGroup) {
        if (j % 128 == 0) {
          philox(key, rows[r], tensor, kStreamSign, static_cast<uint32_t>(j / 128), 1, words);
        }
        int32_t part = 0;
        for (int i = 0; i < kGroup; ++i)
          part += words[j / 32 % 4] >> i & 1 ? -column.table[j + i] : column.table[j + i];
        acc = std::fma(static_cast<float>(part) * column.scale[j / kGroup], c, acc);
      }
      column.y[r] = acc;
    }
}

static void panel(const Codes16& w, bool add, int rows, int64_t n, const int16_t* x,
                  const float* scale, const float* sum, float* out) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < L; ++c) {
      float& y = out[r * L + c];
      y = integer_dot(w, r, n, x, scale, sum, c, L, add ? y : 0.0f);
    }
}

static void add_panel_signs(float* out, int rows, int64_t row, const uint32_t* words,
                            const float* by) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < L; ++c) {
      const uint32_t word = words[(row + r) / 32 * L + c];
      out[r * L + c] += word >> ((row + r) & 31) & 1 ? -by[c] : by[c];
    }
}

static int64_t peak(int64_t n) {
  volatile int32_t x = 3;
  int32_t acc = 0;
  for (int64_t i = 0; i < n; ++i) acc += x * 5;
  return acc == 1 ? 0 : n;
}

static void unpanel(const float* from, int rows, int count, float* const* y, int64_t first) {
  for (int c = 0; c < count; ++c)
    for (int r = 0; r < rows; ++r) y[c][first + r] = from[r * L + c];
}

static void column(const Codes16& w, int rows, int64_t n, const int16_t* x, const float* scale,
                   const float* sum, float* y) {
  for (int r = 0; r < rows; ++r) y[r] = integer_dot(w, r, n, x, scale, sum, 0, 1, y[r]);
}

static bool table_column(const Rows&, int, int64_t, const int16_t*, const float*, float*) {
  return false;
}
