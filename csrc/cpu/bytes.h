// Operations on bytes between files and memory: transposes of numbers of any type, the CRC-32 of zip archives, and
// SHA-256; part of cpu/kernels.cpp, compiled for each instruction set.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__PCLMUL__)
#include <cpuid.h>
#endif

#include "../core/formulas.h"
#include "convert.h"

namespace modelcenter {
namespace {

typedef uint16_t Words16 __attribute__((vector_size(16)));
typedef uint32_t Words32 __attribute__((vector_size(16)));
typedef uint64_t Words64 __attribute__((vector_size(16)));

// The first or the last halves of two vectors, interleaved: one instruction on x86 and on Arm.
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

// The transpose of a square of 64 bytes by as many numbers. It is made in scratch memory, so that each cache line of
// source and target is touched once: lines that are a power of two apart evict each other from the nearest cache.
template <class Vector, class Word>
MC_INLINE void transpose_square(Word* out, const Word* in, const Word* next, int64_t out_stride, int64_t in_stride,
                                bool past_caches) {
  constexpr int kLine = 64 / sizeof(Word), kWords = 16 / sizeof(Word);
  alignas(64) Word scratch[kLine][kLine];
  for (int r = 0; r < kLine; r += kWords) {
    // Processors do not predict the next square, and waiting for it would take longer than everything else.
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
      for (int i = 0; i < kWords; i++) memcpy(&scratch[c + i][r], &rows[i], 16);
    }
  }
  for (int c = 0; c < kLine; c++) put_line(out + c * out_stride, scratch[c], past_caches);
}

// Memory from a file may be unaligned, so numbers are moved as bytes.
template <class Vector, class Word>
void transpose_matrix(Word* out, const Word* in, int64_t rows, int64_t columns, int64_t out_stride, int64_t in_stride,
                      bool past_caches) {
  constexpr int64_t kLine = 64 / sizeof(Word);
  if (rows < kLine || columns < kLine) {
    for (int64_t c = 0; c < columns; c++)
      for (int64_t r = 0; r < rows; r++) memcpy(out + c * out_stride + r, in + r * in_stride + c, sizeof(Word));
    return;
  }
  past_caches = past_caches && (uintptr_t)out % 32 == 0 && out_stride * sizeof(Word) % 32 == 0;
  const auto begin = [](int64_t i, int64_t n) { return i + kLine < n ? i : n - kLine; };  // the last one overlaps
  for (int64_t r = 0; r < rows; r += kLine) {
    const int64_t top = begin(r, rows);
    for (int64_t c = 0; c < columns; c += kLine) {
      const int64_t left = begin(c, columns);
      const Word* next = c + kLine < columns ? in + top * in_stride + begin(c + kLine, columns)
                                             : in + begin(r + kLine, rows) * in_stride;
      transpose_square<Vector>(out + left * out_stride + top, in + top * in_stride + left, next, out_stride, in_stride,
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
    transpose_matrix<decltype(vector)>((Word*)out, (const Word*)in, rows, columns, out_stride, in_stride, past_caches);
  };
  if (size == 2) run(Words16{}, uint16_t{});
  if (size == 4) run(Words32{}, uint32_t{});
  if (size == 8) run(Words64{}, uint64_t{});
}

// Linux maps memory that has never been written to a single page of zeros.
constexpr int64_t kPage = 4096;

// Calls body(offset, bytes) for the part in each page of n bytes at `to`.
template <class Body>
MC_INLINE void for_pages(const uint8_t* to, int64_t n, const Body& body) {
  for (int64_t i = 0; i < n;) {
    const int64_t rest = kPage - (int64_t)((uintptr_t)(to + i) % kPage), here = rest < n - i ? rest : n - i;
    body(i, here);
    i += here;
  }
}

void clear_pages(uint8_t* x, int64_t n) {
  for_pages(x, n, [=](int64_t i, int64_t here) {
    if (has_bits(x + i, here)) memset(x + i, 0, (size_t)here);
  });
}

void copy_pages(uint8_t* to, const uint8_t* x, int64_t n) {
  for_pages(to, n, [=](int64_t i, int64_t here) {
    if (has_bits(x + i, here)) memcpy(to + i, x + i, (size_t)here);
  });
}

// The remainder of x^n modulo the polynomial of CRC-32, with the coefficient of x^0 in the highest bit.
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
// A vector that has the same remainder `Bits` further on as `x` has here.
template <int Bits>
MC_INLINE __m128i fold(__m128i x) {
  const __m128i by = _mm_set_epi64x((int64_t)power_of_x(Bits - 32) << 1, (int64_t)power_of_x(Bits + 32) << 1);
  return _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
}
#endif

// The CRC-32 of n bytes that follow bytes with the CRC-32 `start`, by carry-less products of polynomials (Gopal et al.,
// "Fast CRC computation using PCLMULQDQ", Intel 2009).
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

#if defined(__PCLMUL__)
alignas(16) constexpr uint32_t kRounds[64] = {  // FIPS 180-4, 4.2.2
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

// Advances the states of `kStreams` SHA-256 by that many blocks of 64 bytes each. A round of the processor's own
// instructions waits for the round before as long as a round of another stream takes, so two cost no more than one.
template <int kStreams>
__attribute__((target("sha"))) void sha256_blocks(uint32_t* const* states, const uint8_t* const* x, int64_t blocks) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i abef[kStreams], cdgh[kStreams], w[kStreams][4];
  for (int s = 0; s < kStreams; s++) {
    const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i*)states[s]), 0xB1);
    const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i*)states[s] + 1), 0x1B);
    abef[s] = _mm_alignr_epi8(badc, hgfe, 8), cdgh[s] = _mm_blend_epi16(hgfe, badc, 0xF0);
  }
  for (int64_t block = 0; block < blocks; block++) {
    __m128i before[kStreams][2];
    for (int s = 0; s < kStreams; s++) {
      before[s][0] = abef[s], before[s][1] = cdgh[s];
      for (int k = 0; k < 4; k++)
        w[s][k] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(x[s] + 64 * block) + k), big_endian);
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
      const __m128i k = _mm_load_si128((const __m128i*)kRounds + r);
      for (int s = 0; s < kStreams; s++) {
        __m128i& now = w[s][r % 4];
        const __m128i last = w[s][(r + 3) % 4], sum = _mm_add_epi32(now, k);
        cdgh[s] = _mm_sha256rnds2_epu32(cdgh[s], abef[s], sum);
        abef[s] = _mm_sha256rnds2_epu32(abef[s], cdgh[s], _mm_shuffle_epi32(sum, 0x0E));
        const __m128i sigma = _mm_add_epi32(_mm_sha256msg1_epu32(now, w[s][(r + 1) % 4]),
                                            _mm_alignr_epi8(last, w[s][(r + 2) % 4], 4));
        now = _mm_sha256msg2_epu32(sigma, last);  // for 16 rounds later; the last four are unused
      }
    }
    for (int s = 0; s < kStreams; s++) {
      abef[s] = _mm_add_epi32(abef[s], before[s][0]), cdgh[s] = _mm_add_epi32(cdgh[s], before[s][1]);
    }
  }
  for (int s = 0; s < kStreams; s++) {
    const __m128i feba = _mm_shuffle_epi32(abef[s], 0x1B), dchg = _mm_shuffle_epi32(cdgh[s], 0xB1);
    _mm_storeu_si128((__m128i*)states[s], _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i*)states[s] + 1, _mm_alignr_epi8(dchg, feba, 8));
  }
}
#endif

// Advances two states by whole blocks of bytes; false if this processor has no instructions for SHA-256.
bool sha256(uint32_t* first, const uint8_t* x, int64_t n, uint32_t* second, const uint8_t* y, int64_t m) {
#if defined(__PCLMUL__)
  static const bool found = [] {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
  }();
  if (!found) return false;
  const int64_t both = (n < m ? n : m) / 64;
  uint32_t* const states[] = {first, second};
  const uint8_t* const bytes[] = {x, y};
  sha256_blocks<2>(states, bytes, both);
  uint32_t* const longer[] = {n > m ? first : second};
  const uint8_t* const rest[] = {(n > m ? x : y) + 64 * both};
  sha256_blocks<1>(longer, rest, (n > m ? n : m) / 64 - both);
  return true;
#else
  (void)first, (void)x, (void)n, (void)second, (void)y, (void)m;
  return false;
#endif
}

}  // namespace
}  // namespace modelcenter
