// Dropout of a range of channels of one token; part of cpu/kernels.cpp, compiled for each instruction set.
#pragma once
#include "../core/random.h"
#include "convert.h"

namespace modelcenter {
namespace {

using Words = uint32_t[4][kDropoutLanes];

#if defined(__AVX512F__)
// The four words of a counter are in 64-bit lanes, of which the multiplication reads the lower half, so the upper half
// is not cleared. Even counters are in one vector, odd ones in another.
struct Wide {
  using V = __m512i;
  static constexpr int kCounters = 16;  // in a pair of vectors
  static constexpr int kPairs = 2;      // computed together: they fit the registers
  MC_INLINE static V all(uint64_t x) { return _mm512_set1_epi64((long long)x); }
  MC_INLINE static V even() { return _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0); }
  MC_INLINE static V add(V a, V b) { return _mm512_add_epi64(a, b); }
  MC_INLINE static V times(V a, V b) { return _mm512_mul_epu32(a, b); }
  MC_INLINE static V high(V a) { return _mm512_srli_epi64(a, 32); }
  MC_INLINE static V xor3(V a, V b, V c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
  MC_INLINE static void store(uint32_t* to, V even, V odd) {
    _mm512_store_si512((__m512i*)to, _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32)));
  }
};
#elif defined(__AVX2__)
struct Wide {
  using V = __m256i;
  static constexpr int kCounters = 8, kPairs = 1;
  MC_INLINE static V all(uint64_t x) { return _mm256_set1_epi64x((long long)x); }
  MC_INLINE static V even() { return _mm256_set_epi64x(6, 4, 2, 0); }
  MC_INLINE static V add(V a, V b) { return _mm256_add_epi64(a, b); }
  MC_INLINE static V times(V a, V b) { return _mm256_mul_epu32(a, b); }
  MC_INLINE static V high(V a) { return _mm256_srli_epi64(a, 32); }
  MC_INLINE static V xor3(V a, V b, V c) { return _mm256_xor_si256(a, _mm256_xor_si256(b, c)); }
  MC_INLINE static void store(uint32_t* to, V even, V odd) {
    _mm256_store_si256((__m256i*)to, _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA));
  }
};
#endif

#if defined(__AVX512F__) || defined(__AVX2__)
// The words of the counters (a, b, c, e), in vectors of 64-bit lanes, with even counters in the first vector of each
// pair; written from `to` on in each row of words.
template <int kVectors, int kCount>
MC_INLINE void rounds(const Draw& d, Wide::V (&a)[kVectors], Wide::V (&b)[kVectors], Wide::V (&c)[kVectors],
                      Wide::V (&e)[kVectors], uint32_t (&words)[4][kCount], int to) {
  using V = Wide::V;
  const V by_a = Wide::all(kPhiloxA), by_c = Wide::all(kPhiloxB);
  uint32_t low = d.key_low, high = d.key_high;
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; round++) {
    const V key_low = Wide::all(low), key_high = Wide::all(high);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      const V x = Wide::times(by_a, a[i]), y = Wide::times(by_c, c[i]);
      a[i] = Wide::xor3(Wide::high(y), b[i], key_low);
      c[i] = Wide::xor3(Wide::high(x), e[i], key_high);
      b[i] = y;
      e[i] = x;
    }
    low += kPhiloxKeyA;
    high += kPhiloxKeyB;
  }
  for (int i = 0; i < kVectors; i += 2) {
    const int at = to + i / 2 * Wide::kCounters;
    Wide::store(words[0] + at, a[i], a[i + 1]);
    Wide::store(words[1] + at, b[i], b[i + 1]);
    Wide::store(words[2] + at, c[i], c[i + 1]);
    Wide::store(words[3] + at, e[i], e[i + 1]);
  }
}
#endif

// The words of the 16 counters of a block.
MC_INLINE void draw(const Draw& d, uint64_t token, uint32_t block, Words& words) {
#if defined(__AVX512F__) || defined(__AVX2__)
#pragma GCC unroll 2
  for (int at = 0; at < kDropoutLanes; at += Wide::kCounters) {
    Wide::V a[2], b[2], c[2], e[2];
    for (int i = 0; i < 2; i++) {
      a[i] = Wide::add(Wide::even(), Wide::all((uint64_t)block * kDropoutLanes + (uint64_t)(at + i)));
      b[i] = Wide::all(d.site);
      c[i] = Wide::all((uint32_t)token);
      e[i] = Wide::all(token >> 32);
    }
    rounds(d, a, b, c, e, words, at);
  }
#else
  for (int lane = 0; lane < kDropoutLanes; lane++) {
    uint32_t out[4];
    philox(d.key_low, d.key_high, block * kDropoutLanes + (uint32_t)lane, d.site, token, out);
    for (int word = 0; word < 4; word++) words[word][lane] = out[word];
  }
#endif
}

// The words of one counter for the first `count` of the tokens; those of the others may be written, too.
template <int64_t kTokens>
MC_INLINE void draw_tokens(const Draw& d, const uint64_t (&tokens)[kTokens], int64_t count, uint32_t counter,
                           uint32_t (&words)[4][kTokens]) {
#if defined(__AVX512F__) || defined(__AVX2__)
  constexpr int kLanes = Wide::kCounters / 2, kMost = 2 * Wide::kPairs;
  constexpr int kVectors = kMost * kLanes < kTokens ? kMost : (int)kTokens / kLanes;
  static_assert(kTokens % (kVectors * kLanes) == 0 && kVectors % 2 == 0, "pairs of vectors must fill the tokens");
  for (int at = 0; at < count; at += kVectors * kLanes) {
    Wide::V a[kVectors], b[kVectors], c[kVectors], e[kVectors];
    for (int i = 0; i < kVectors; i++) {
      uint64_t low[kLanes], high[kLanes];
      for (int k = 0; k < kLanes; k++) {
        // even tokens are in one vector, odd ones in another
        const uint64_t token = tokens[at + i / 2 * 2 * kLanes + 2 * k + i % 2];
        low[k] = (uint32_t)token;
        high[k] = token >> 32;
      }
      a[i] = Wide::all(counter);
      b[i] = Wide::all(d.site);
      memcpy(&c[i], low, sizeof low);
      memcpy(&e[i], high, sizeof high);
    }
    rounds(d, a, b, c, e, words, at);
  }
#else
  for (int lane = 0; lane < count; lane++) {
    uint32_t out[4];
    philox(d.key_low, d.key_high, counter, d.site, tokens[lane], out);
    for (int word = 0; word < 4; word++) words[word][lane] = out[word];
  }
#endif
}

// 16 channels. Compilers do not vectorise loops that they have unrolled before.
MC_INLINE void keep(const uint32_t* __restrict words, const int half, uint32_t threshold, float scale,
                    const float* __restrict x, float* __restrict out) {
#pragma GCC unroll 1
  for (int k = 0; k < kDropoutLanes; k++) out[k] = dropped(x[k], words[k], half, threshold, scale);
}

MC_INLINE void keep(const uint32_t* __restrict words, const int half, uint32_t threshold, float scale,
                    const float* __restrict x, const float* __restrict residual, float* __restrict out) {
#pragma GCC unroll 1
  for (int k = 0; k < kDropoutLanes; k++) out[k] = residual[k] + dropped(x[k], words[k], half, threshold, scale);
}

// Channels [begin, end) of row i; x, residual (may be null) and out are of this type and begin at channel 0 of the row.
void dropout(const Draw& d, int64_t i, const void* x, const void* residual, void* out, int type, int64_t begin,
             int64_t end) {
  alignas(64) Words words;
  alignas(64) float scratch_x[kDropoutBlock], scratch_r[kDropoutBlock], scratch_out[kDropoutBlock];
  const uint64_t token = (uint64_t)(d.tokens ? d.tokens[i] : d.first_token + i);
  const uint32_t threshold = d.threshold;
  const float scale = d.scale;
  int64_t next;
  for (int64_t at = begin; at < end; at = next) {
    const int64_t channel = d.first_channel + at;
    const int64_t skipped = channel % kDropoutBlock;
    next = at + kDropoutBlock - skipped < end ? at + kDropoutBlock - skipped : end;
    const int64_t n = next - at;
    ask_ahead(place(x, type, at), n * size_of(type));
    if (residual) ask_ahead(place(residual, type, at), n * size_of(type));
    draw(d, token, (uint32_t)(channel / kDropoutBlock), words);
    const float* source = floats(x, type, at, scratch_x, n);
    const float* add = residual ? floats(residual, type, at, scratch_r, n) : nullptr;
    float* target = type == kFloat ? (float*)out + at : scratch_out;
    if (n == kDropoutBlock) {
      for (int word = 0; word < 4; word++) {
        const int to = 2 * word * kDropoutLanes;
        if (add) {
          keep(words[word], 0, threshold, scale, source + to, add + to, target + to);
          keep(words[word], 1, threshold, scale, source + to + kDropoutLanes, add + to + kDropoutLanes,
               target + to + kDropoutLanes);
        } else {
          keep(words[word], 0, threshold, scale, source + to, target + to);
          keep(words[word], 1, threshold, scale, source + to + kDropoutLanes, target + to + kDropoutLanes);
        }
      }
    } else if (skipped % kDropoutLanes == 0) {
      // A short row: whole vectors, the last of them padded.
      alignas(64) float last_x[kDropoutLanes] = {}, last_r[kDropoutLanes] = {}, last_out[kDropoutLanes];
      for (int64_t k = 0; k < n; k += kDropoutLanes) {
        const int group = (int)((skipped + k) / kDropoutLanes);
        const float* from = source + k;
        const float* plus = add ? add + k : nullptr;
        float* to = target + k;
        const int64_t rest = n - k;
        if (rest < kDropoutLanes) {
          for (int64_t i = 0; i < rest; i++) last_x[i] = from[i];
          if (plus) for (int64_t i = 0; i < rest; i++) last_r[i] = plus[i];
          from = last_x, plus = plus ? last_r : nullptr, to = last_out;
        }
        if (plus) {
          keep(words[group / 2], group % 2, threshold, scale, from, plus, to);
        } else {
          keep(words[group / 2], group % 2, threshold, scale, from, to);
        }
        if (rest < kDropoutLanes)
          for (int64_t i = 0; i < rest; i++) target[k + i] = last_out[i];
      }
    } else {
      for (int64_t k = 0; k < n; k++) {
        const int c = (int)(skipped + k);
        const float y = dropped(source[k], words[c / 32][c % 16], c / 16 % 2, threshold, scale);
        target[k] = add ? add[k] + y : y;
      }
    }
    if (type != kFloat) from_floats(scratch_out, place(out, type, at), type, n);
  }
}

}  // namespace
}  // namespace modelcenter
