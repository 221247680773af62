// Conversions between fp32 and other types; part of cpu/kernels.cpp, compiled for each instruction set.
#pragma once
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../core/job.h"
#include "../core/numbers.h"

namespace modelcenter {
namespace {

// A CPU prefetches within a page of an array, and waits at the beginning of the next one, so loops over arrays prefetch
// kAhead bytes ahead.
constexpr int64_t kAhead = 1024;
MC_INLINE void ask_for(const void* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const char*)p + line);
}
template <class Number>
MC_INLINE void ask_ahead(const Number* p, int64_t n) {
  ask_for((const char*)p + kAhead, n * (int64_t)sizeof(Number));
}

constexpr int64_t kStrip = 64;

// Calls body(begin, end) for strips of n numbers.
template <class Body>
MC_INLINE void in_strips(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kStrip <= n; i += kStrip) body(i, i + kStrip);
  if (i < n) body(i, n);
}

// Numbers that are processed together: their fp32 values stay in the first cache.
constexpr int64_t kBlock = 512;
template <class F>
MC_INLINE void each(int64_t n, const F& body) {
  if (n == kBlock) {
    for (int64_t i = 0; i < kBlock; i++) body(i);
  } else {
    for (int64_t i = 0; i < n; i++) body(i);
  }
}

MC_INLINE void halves_to_floats(const uint16_t* __restrict in, float* __restrict out, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(in + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(in + i))));
#endif
  for (; i < n; i++) out[i] = from_fp16(in[i]);
}

MC_INLINE void floats_to_halves(const float* __restrict in, uint16_t* __restrict out, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(out + i), _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) out[i] = to_fp16(in[i]);
}

MC_INLINE void to_floats(const void* in, int type, float* __restrict out, int64_t n) {
  if (type == kHalf) return halves_to_floats((const uint16_t*)in, out, n);
  const uint16_t* __restrict b = (const uint16_t*)in;
  if (type == kBfloat16) return each(n, [=](int64_t i) { out[i] = from_bf16(b[i]); });
  memcpy(out, in, 4 * n);
}

MC_INLINE void from_floats(const float* __restrict in, void* out, int type, int64_t n) {
  if (type == kHalf) return floats_to_halves(in, (uint16_t*)out, n);
  uint16_t* __restrict b = (uint16_t*)out;
  if (type == kBfloat16) return each(n, [=](int64_t i) { b[i] = to_bf16(in[i]); });
  memcpy(out, in, 4 * n);
}

MC_INLINE char* place(const void* base, int type, int64_t i) {
  return (char*)base + i * (type == kFloat ? 4 : 2);
}

// Whether any bit of n bytes is 1.
MC_INLINE bool has_bits(const void* of, int64_t n) {
  const uint8_t* __restrict x = (const uint8_t*)of;
  for (int64_t i = 0; i < n; i += 512) {
    uint8_t some = 0;
    for (int64_t k = i; k < (i + 512 < n ? i + 512 : n); k++) some |= x[k];
    if (some) return true;
  }
  return false;
}

// Whether n bytes of 16- or 32-bit numbers are all zero. If not, mostly the first one tells.
MC_INLINE bool are_zeros(const void* x, int64_t n) {
  uint16_t first;
  memcpy(&first, x, sizeof(first));
  return !first && !has_bits(x, n);
}

// fp32 numbers in place, others converted in `scratch`.
MC_INLINE float* floats(const void* base, int type, int64_t i, float* scratch, int64_t n) {
  if (type == kFloat) return (float*)base + i;
  to_floats(place(base, type, i), type, scratch, n);
  return scratch;
}

}  // namespace
}  // namespace modelcenter
