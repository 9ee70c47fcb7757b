// The specification of the codecs: one weight at a time.
void decode(int type, const void* row, int64_t n, float* out) {
  const bool block = with_format(type, [&](auto* format) {
    using Block = std::remove_pointer_t<decltype(format)>;
    constexpr int groups = Block::weights / Block::group;
    const Block* b = static_cast<const Block*>(row);
    for (int64_t i = 0; i < n; ++b) {
      int8_t room[Block::weights];
      float s[groups], o[groups] = {};
      b->scales(PlainHalf(), s, o);
      const int8_t* q = b->unpack(room);
      for (int k = 0; k < Block::weights; ++k, ++i) {
        const float v = s[k / Block::group] * static_cast<float>(q[k]);
        out[i] = Block::offset ? v + o[k / Block::group] : v;
      }
    }
  });
  if (block) return;
  if (is_table(type)) {
    const Table4* b = static_cast<const Table4*>(row);
    const float* value = table_of(type);
    for (int64_t i = 0; i < n; i += Table4::weights, ++b)
      for (int k = 0; k < Table4::weights; ++k)
        out[i + k] = value[k % 2 ? b->qs[k / 2] & 15 : b->qs[k / 2] >> 4] * b->d;
    return;
  }
  const uint16_t* h = static_cast<const uint16_t*>(row);
  if (type == kTypeF32) {
    memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
  } else {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = type == kTypeF16 ? half_to_float(h[i]) : float_of(static_cast<uint32_t>(h[i]) << 16);
    }
  }
}

void cells(int type, const void* row, int64_t n, float float_cell, float* out) {
  const bool block = with_format(type, [&](auto* format) {
    using Block = std::remove_pointer_t<decltype(format)>;
    constexpr int groups = Block::weights / Block::group;
    const Block* b = static_cast<const Block*>(row);
    for (int64_t i = 0; i < n; i += Block::weights, ++b) {
      float s[groups], o[groups];
      b->scales(PlainHalf(), s, o);
      for (int g = 0; g < groups; ++g) *out++ = std::fabs(s[g]);
    }
  });
  if (block) return;
  if (is_table(type)) return table_cells(row, n, out);
  for (int64_t i = 0; i < n; i += kFloatGroup) *out++ = float_cell;
}

void add_plane(int bits, const uint8_t* plane, const float* step, int group, int64_t n, float* w) {
  for (int64_t i = 0; i < n; i += 32, plane += 4 * bits) {
    uint8_t q[32];
    unpack_plane(bits, plane, q);
    for (int k = 0; k < 32 && i + k < n; ++k) {
      const float move = step[(i + k) / group] * static_cast<float>(q[k] - (1 << (bits - 1)));
      w[i + k] = w[i + k] + move;
    }
  }
}
