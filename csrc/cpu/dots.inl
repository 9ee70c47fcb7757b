// Products with one column: blocks are decoded into registers and used there, R rows side by side.
// Values and the order of the sums are those of decode, add_plane and tile.

// Weights of one block, and of its piece of a four-bit plane, as Block::weights / L vectors.
template <class Block, int BITS>
EDGEES_INLINE void block_values(const Block* b, const uint8_t* plane, float part, F* v) {
  constexpr int groups = Block::weights / Block::group, per = Block::group / L;
  alignas(64) int8_t room[Block::weights];
  float s[groups], o[groups] = {};
  b->scales(Half(), s, o);
  const int8_t* q = b->unpack(room);
  for (int g = 0; g < groups; ++g) {
    const F scale = set1(s[g]), offset = set1(o[g]);
    for (int k = 0; k < per; ++k) {
      const F w = mul(scale, from_i8(q + (g * per + k) * L));
      v[g * per + k] = Block::offset ? add(w, offset) : w;
    }
  }
  if constexpr (BITS == 4) {
    const F middle = set1(8.0f);
    for (int i = 0; i < Block::weights; i += 32) {
      alignas(64) uint8_t c[32];
      unpack_plane(4, plane + i / 2, c);
      for (int k = 0; k < 32; k += L) {
        const F step = set1(std::fabs(s[(i + k) / Block::group]) * part);
        F& w = v[(i + k) / L];
        w = add(w, mul(step, sub(from_u8(c + k), middle)));
      }
    }
  }
}

#if defined(EDGEES_ARM_AVX512)
// Formats of 32 weights, whose first halves are scale and offset.
template <class Block, int BITS>
EDGEES_INLINE void small_values(const Block* b, const uint8_t* plane, float part, F* v) {
  const __m128 head = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(b)));
  const F scale = _mm512_broadcastss_ps(head);
  if constexpr (Block::lo == -128) {
    v[0] = mul(scale, from_i8(reinterpret_cast<const int8_t*>(b->qs)));
    v[1] = mul(scale, from_i8(reinterpret_cast<const int8_t*>(b->qs) + 16));
  } else {
    F values = mul(scale, sixteen(Block::lo));
    if constexpr (Block::offset) {
      values = add(values, _mm512_broadcastss_ps(_mm_movehdup_ps(head)));
    }
    const __m512i bytes = widen(reinterpret_cast<const uint8_t*>(b->qs));
    v[0] = low(bytes, values);
    v[1] = high(bytes, values);
  }
  if constexpr (BITS == 4) {
    const F steps = mul(mul(_mm512_abs_ps(scale), set1(part)), sixteen(-8));
    const __m512i bytes = widen(plane);
    v[0] = add(v[0], low(bytes, steps));
    v[1] = add(v[1], high(bytes, steps));
  }
}
#endif

template <class Block, int BITS, int R>
EDGEES_INLINE void dot_rows(const uint8_t* rows, int64_t stride, const uint8_t* plane,
                            int64_t plane_stride, float part, int64_t n, const float* x, float* y) {
  F acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int64_t i = 0, block = 0; i < n; i += Block::weights, ++block) {
    for (int r = 0; r < R; ++r) {
      F v[Block::weights / L];
      const Block* b = reinterpret_cast<const Block*>(rows + r * stride) + block;
      const uint8_t* p = BITS ? plane + r * plane_stride + i / 2 : nullptr;
#if defined(EDGEES_ARM_AVX512)
      if constexpr (Block::weights == 32 && (Block::hi - Block::lo == 15 || Block::lo == -128)) {
        small_values<Block, BITS>(b, p, part, v);
      } else {
        block_values<Block, BITS>(b, p, part, v);
      }
#else
      block_values<Block, BITS>(b, p, part, v);
#endif
      for (int k = 0; k < Block::weights / L; ++k) {
        acc[r] = fma(v[k], load(x + i + k * L), acc[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) y[r] = sum(acc[r]);
}

template <class Block, int BITS>
void dots_of(const uint8_t* rows, int64_t stride, const uint8_t* plane, int64_t plane_stride,
             float part, int count, int64_t n, const float* x, float* y) {
  int r = 0;
  for (; r + 4 <= count; r += 4) {
    dot_rows<Block, BITS, 4>(rows + r * stride, stride, plane + r * plane_stride, plane_stride,
                             part, n, x, y + r);
  }
  for (; r < count; ++r) {
    dot_rows<Block, BITS, 1>(rows + r * stride, stride, plane + r * plane_stride, plane_stride,
                             part, n, x, y + r);
  }
}

bool dots(int type, const uint8_t* rows, int64_t stride, int bits, const uint8_t* plane,
          int64_t plane_stride, float part, int count, int64_t n, const float* x, float* y) {
  if (bits != 0 && bits != 4) return false;
  return with_format(type, [&](auto* format) {
    using Block = std::remove_pointer_t<decltype(format)>;
    if (bits == 4) {
      dots_of<Block, 4>(rows, stride, plane, plane_stride, part, count, n, x, y);
    } else {
      dots_of<Block, 0>(rows, stride, plane, 0, part, count, n, x, y);
    }
  });
}
