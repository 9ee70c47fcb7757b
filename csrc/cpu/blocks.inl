// Block codecs and residual planes with one float vector type (simd.h).
#if defined(EDGEES_ARM_NEON)
using Half = PlainHalf;
#else
struct Half {
    EDGEES_METHOD float operator()(uint16_t h) const { return _cvtsh_ss(h); }
};
#endif

template <bool OFFSET>
EDGEES_INLINE void affine(const int8_t* q, int n, float scale, float offset, float* out) {
    const F s = set1(scale);
    const F o = set1(offset);
    for (int i = 0; i < n; i += L) {
        const F v = mul(s, from_i8(q + i));
        store(out + i, OFFSET ? add(v, o) : v);
    }
}

template <class Block>
void decode_blocks(const void* row, int64_t n, float* out) {
    const Block* b = static_cast<const Block*>(row);
    constexpr int groups = Block::weights / Block::group;
    for (int64_t i = 0; i < n; i += Block::weights, ++b) {
        alignas(64) int8_t q[Block::weights];
        float s[groups], o[groups] = {};
        b->scales(Half(), s, o);
        b->unpack(q);
        for (int g = 0; g < groups; ++g) {
            affine<Block::offset>(q + g * Block::group, Block::group, s[g], o[g],
                                  out + i + g * Block::group);
        }
    }
}

static void decode_half(const uint16_t* h, int64_t n, float* out) {
    int64_t i = 0;
#if defined(EDGEES_ARM_AVX512)
    for (; i + 16 <= n; i += 16) {
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(
                                      reinterpret_cast<const __m256i*>(h + i))));
    }
#elif defined(EDGEES_ARM_AVX2)
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(
            out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i))));
    }
#elif defined(EDGEES_ARM_NEON)
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + i))));
    }
#endif
    for (; i < n; ++i) out[i] = half_to_float(h[i]);
}

void decode(int type, const void* row, int64_t n, float* out) {
    if (with_format(type, [&](auto* block) {
            decode_blocks<std::remove_pointer_t<decltype(block)>>(row, n, out);
        })) {
        return;
    }
    const uint16_t* h = static_cast<const uint16_t*>(row);
    if (type == kTypeF32) {
        memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
    } else if (type == kTypeF16) {
        decode_half(h, n, out);
    } else {
        for (int64_t i = 0; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(h[i]) << 16);
    }
}

void cells(int type, const void* row, int64_t n, float float_cell, float* out) {
    const bool block = with_format(type, [&](auto* format) {
        using Block = std::remove_pointer_t<decltype(format)>;
        constexpr int groups = Block::weights / Block::group;
        const Block* b = static_cast<const Block*>(row);
        for (int64_t i = 0; i < n; i += Block::weights, ++b, out += groups) {
            float o[groups];
            b->scales(Half(), out, o);
            for (int g = 0; g < groups; ++g) out[g] = std::fabs(out[g]);
        }
    });
    if (!block) {
        for (int64_t i = 0; i < n; i += kFloatGroup) *out++ = float_cell;
    }
}

template <int BITS>
EDGEES_INLINE void add_plane_of(const uint8_t* plane, const float* step, int group, int64_t n,
                                float* w) {
    const F middle = set1(static_cast<float>(1 << (BITS - 1)));
    int64_t i = 0;
    for (; i + 32 <= n; i += 32, plane += 4 * BITS) {
        alignas(64) uint8_t q[32];
        unpack_plane(BITS, plane, q);
        const float* s = step + i / group;
        for (int k = 0; k < 32; k += L) {
            const F move = mul(set1(group == 16 ? s[k >> 4] : s[0]), sub(from_u8(q + k), middle));
            store(w + i + k, add(load(w + i + k), move));
        }
    }
    if (i < n) {
        uint8_t q[32];
        unpack_plane(BITS, plane, q);
        for (int k = 0; i < n; ++i, ++k) {
            const float move = step[i / group] * static_cast<float>(q[k] - (1 << (BITS - 1)));
            w[i] = w[i] + move;
        }
    }
}

void add_plane(int bits, const uint8_t* plane, const float* step, int group, int64_t n, float* w) {
    if (bits == 8) {
        add_plane_of<8>(plane, step, group, n, w);
    } else if (bits == 4) {
        add_plane_of<4>(plane, step, group, n, w);
    } else {
        add_plane_of<2>(plane, step, group, n, w);
    }
}
