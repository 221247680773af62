// Bytes on their way between files and memory, a part of cpu/kernels.cpp, compiled for each instruction set: transposes
// of numbers of any kind, and the CRC-32 of zip archives.
#pragma once

#include <string.h>

namespace modelcenter {
namespace {

typedef uint16_t Words16 __attribute__((vector_size(16)));
typedef uint32_t Words32 __attribute__((vector_size(16)));
typedef uint64_t Words64 __attribute__((vector_size(16)));

// The first or the last halves of two vectors, a number of each in turn: one instruction of x86 and of Arm.
MC_INLINE Words16 first_halves(Words16 a, Words16 b) {
  return Words16{a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]};
}
MC_INLINE Words16 last_halves(Words16 a, Words16 b) {
  return Words16{a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]};
}
MC_INLINE Words32 first_halves(Words32 a, Words32 b) { return Words32{a[0], b[0], a[1], b[1]}; }
MC_INLINE Words32 last_halves(Words32 a, Words32 b) { return Words32{a[2], b[2], a[3], b[3]}; }
MC_INLINE Words64 first_halves(Words64 a, Words64 b) { return Words64{a[0], b[0]}; }
MC_INLINE Words64 last_halves(Words64 a, Words64 b) { return Words64{a[1], b[1]}; }

MC_INLINE void put_line(void* out, const void* line, bool past_caches) {
#if defined(__AVX2__)
  if (past_caches) {
    for (int k = 0; k < 2; k++)
      _mm256_stream_si256((__m256i*)out + k, _mm256_load_si256((const __m256i*)line + k));
    return;
  }
#endif
  (void)past_caches;
  memcpy(out, line, 64);
}

// The transpose of a square of 64 bytes by as many numbers. It is made in a room of its own, so that each cache line of
// either side is touched once: lines that lie a power of two apart push each other out of the nearest cache.
template <class Vector, class Word>
MC_INLINE void turn_square(Word* out, const Word* in, const Word* next, int64_t out_stride, int64_t in_stride,
                           bool past_caches) {
  constexpr int kLine = 64 / sizeof(Word), kWords = 16 / sizeof(Word);
  alignas(64) Word room[kLine][kLine];
  for (int r = 0; r < kLine; r += kWords) {
    // No processor guesses that the next square is next, and to wait for it would take longer than all the rest.
    for (int i = 0; i < kWords; i++) __builtin_prefetch(next + (r + i) * in_stride);
    for (int c = 0; c < kLine; c += kWords) {
      Vector rows[kWords], turned[kWords];
      for (int i = 0; i < kWords; i++) memcpy(&rows[i], in + (r + i) * in_stride + c, 16);
      for (int step = kWords; step > 1; step /= 2) {
        for (int i = 0; i < kWords / 2; i++) {
          turned[2 * i] = first_halves(rows[i], rows[i + kWords / 2]);
          turned[2 * i + 1] = last_halves(rows[i], rows[i + kWords / 2]);
        }
        memcpy(rows, turned, sizeof rows);
      }
      for (int i = 0; i < kWords; i++) memcpy(&room[c + i][r], &rows[i], 16);
    }
  }
  for (int c = 0; c < kLine; c++) put_line(out + c * out_stride, room[c], past_caches);
}

// Memory that came from a file may begin anywhere: numbers move as bytes.
template <class Vector, class Word>
void turn(Word* out, const Word* in, int64_t rows, int64_t columns, int64_t out_stride, int64_t in_stride,
          bool past_caches) {
  constexpr int64_t kLine = 64 / sizeof(Word);
  if (rows < kLine || columns < kLine) {
    for (int64_t c = 0; c < columns; c++)
      for (int64_t r = 0; r < rows; r++) memcpy(out + c * out_stride + r, in + r * in_stride + c, sizeof(Word));
    return;
  }
  past_caches = past_caches && (uintptr_t)out % 32 == 0 && out_stride * sizeof(Word) % 32 == 0;
  const auto begin = [](int64_t i, int64_t n) { return i + kLine < n ? i : n - kLine; };  // the last ones overlap
  for (int64_t r = 0; r < rows; r += kLine) {
    const int64_t top = begin(r, rows);
    for (int64_t c = 0; c < columns; c += kLine) {
      const int64_t left = begin(c, columns);
      const Word* next = c + kLine < columns ? in + top * in_stride + begin(c + kLine, columns)
                                             : in + begin(r + kLine, rows) * in_stride;
      turn_square<Vector>(out + left * out_stride + top, in + top * in_stride + left, next, out_stride, in_stride,
                          past_caches && top % kLine == 0);
    }
  }
#if defined(__AVX2__)
  if (past_caches) _mm_sfence();
#endif
}

void transpose(void* out, const void* in, int size, int64_t rows, int64_t columns, int64_t out_stride,
               int64_t in_stride, bool past_caches) {
  const auto run = [&](auto vector, auto word) {
    using Word = decltype(word);
    turn<decltype(vector)>((Word*)out, (const Word*)in, rows, columns, out_stride, in_stride, past_caches);
  };
  if (size == 2) run(Words16{}, uint16_t{});
  if (size == 4) run(Words32{}, uint32_t{});
  if (size == 8) run(Words64{}, uint64_t{});
}

// The remainder of x^n by the polynomial of CRC-32, the coefficient of x^0 in the highest bit.
constexpr uint32_t power_of_x(int n) {
  uint32_t r = 0x80000000u;
  for (int i = 0; i < n; i++) r = (r >> 1) ^ (r & 1 ? 0xEDB88320u : 0u);
  return r;
}

struct CrcTable {
  uint32_t of[256] = {};
  constexpr CrcTable() {
    for (uint32_t b = 0; b < 256; b++) {
      of[b] = b;
      for (int i = 0; i < 8; i++) of[b] = (of[b] >> 1) ^ (of[b] & 1 ? 0xEDB88320u : 0u);
    }
  }
};
constexpr CrcTable kCrc;

MC_INLINE uint32_t crc_bytes(uint32_t r, const uint8_t* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) r = (r >> 8) ^ kCrc.of[(r ^ x[i]) & 255];
  return r;
}

#if defined(__PCLMUL__)
// A vector that, `Bits` further on, leaves the remainder that `x` leaves here.
template <int Bits>
MC_INLINE __m128i fold(__m128i x) {
  const __m128i by = _mm_set_epi64x((int64_t)power_of_x(Bits - 32) << 1, (int64_t)power_of_x(Bits + 32) << 1);
  return _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
}
#endif

// The CRC-32 of n bytes that follow those whose CRC-32 is `start`. Remainders of polynomials by carry-less products
// (Gopal et al., "Fast CRC computation using PCLMULQDQ", Intel 2009).
uint32_t crc32(uint32_t start, const uint8_t* x, int64_t n) {
  uint32_t r = ~start;
#if defined(__PCLMUL__)
  if (n >= 64) {
    __m128i lanes[4];
    for (int k = 0; k < 4; k++) lanes[k] = _mm_loadu_si128((const __m128i*)x + k);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)r));
    int64_t i = 64;
    for (; i + 64 <= n; i += 64)
      for (int k = 0; k < 4; k++)
        lanes[k] = _mm_xor_si128(fold<512>(lanes[k]), _mm_loadu_si128((const __m128i*)(x + i) + k));
    __m128i all = lanes[0];
    for (int k = 1; k < 4; k++) all = _mm_xor_si128(fold<128>(all), lanes[k]);
    uint8_t rest[16];
    _mm_storeu_si128((__m128i*)rest, all);
    r = crc_bytes(0, rest, 16);
    x += i, n -= i;
  }
#endif
  return ~crc_bytes(r, x, n);
}

}  // namespace
}  // namespace modelcenter
