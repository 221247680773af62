// Products of fp32 matrices with operands in place; part of cpu/kernels.cpp, compiled for each instruction set, and of
// cpu/rounded.cpp.
//
// Panels of both operands are packed into scratch memory, in the order in which the innermost loop reads them, so that
// a transposed operand costs nothing. Each element of the result is summed over t in the same order, however the result
// is divided among threads. Packed words have 4 bytes: one number (Exact), or two rounded ones (Rounded).
#pragma once

#include "convert.h"
#include "kernels.h"
#include "lanes.h"

namespace modelcenter {
namespace {

constexpr int64_t kTall = 8, kWide = 32;                          // the size of a tile, whose sums are in registers
constexpr int64_t kDepth = 192, kHeight = 1024, kWidth = 128;     // in words; kHeight x kDepth of a fit the L2
constexpr int64_t kTallPanel = kTall * kDepth + 16, kWidePanel = kWide * kDepth + 16;  // not a power of two apart
static_assert(kProductScratch >= kHeight / kTall * kTallPanel + kWidth / kWide * kWidePanel, "it is too small");

// The sums of an inner tile are in registers: a whole tile on AVX-512, elsewhere a quarter of it at a time.
#if defined(__AVX512F__)
constexpr int kRows = 8, kBytes = 64;
#elif defined(__AVX2__)
constexpr int kRows = 4, kBytes = 32;
#else
constexpr int kRows = 4, kBytes = 16;
#endif
constexpr int kVectors = 2, kNumbersEach = kBytes / 4, kColumns = kVectors * kNumbersEach;
static_assert(kTall % kRows == 0, "inner tiles must fill a tile");

typedef float Vector __attribute__((vector_size(kBytes), aligned(4), may_alias));

MC_INLINE void fetch(const float* p) { __builtin_prefetch(p, 0, 3); }

// Rows of contiguous numbers.
struct Rows {
  const float* at;
  int64_t stride;
};

// Packs numbers unchanged, one per word.
struct Exact {
  static constexpr int64_t kSteps = 1;
  static MC_INLINE Vector plus_product(Vector sum, float x, Vector y) {
    // Rounded once if there are instructions for it: AVX2 and AVX-512 give the same bits, others may differ.
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps(_mm512_set1_ps(x), (__m512)y, (__m512)sum);
#elif defined(__AVX2__)
    return (Vector)_mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)y, (__m256)sum);
#else
    return sum + x * y;
#endif
  }
  // Packs rows [0, depth) of x, which are contiguous, into panels of kOf columns; the last one is padded with zeros.
  // The sums of the columns are added to `sums`, unless it is null.
  template <int64_t kOf>
  static void pack(const float* x, int64_t stride, int64_t depth, int64_t columns, float* to, float* sums);
  // The same for the transpose of x: panels of kOf rows, from columns [0, depth).
  template <int64_t kOf>
  static void pack_rows(const float* x, int64_t stride, int64_t depth, int64_t rows, float* to, float* sums);
  // A number as it is rounded before it is multiplied.
  static MC_INLINE float multiplied(float x) { return x; }
  // Rows as words of adjacent numbers, n in all, or of numbers of consecutive rows, as if zeros followed the last row.
  // n and the width are multiples of 16. With one number per word, rows are used in place.
  static MC_INLINE const float* along(const float* x, int64_t, float*) { return x; }
  static MC_INLINE Rows across(const Rows& x, int64_t, int64_t, float*) { return x; }
};

// A tile with kOf columns of out = the sum over t of a[i * a_row + t * a_step] b[t * b_step + j], added to `out` if
// `add`, or to the bias of its columns, which may be null. depth and steps are in words.
template <int64_t kOf = kWide, class Words = Exact>
MC_INLINE void tile(int64_t depth, const float* __restrict a, int64_t a_row, int64_t a_step, const float* __restrict b,
                    int64_t b_step, float* out, int64_t stride, bool add, const float* bias = nullptr) {
  constexpr int kEach = kOf < kColumns ? (int)kOf / kNumbersEach : kVectors;  // vectors of a row of an inner tile
  static_assert(kOf % (kEach * kNumbersEach) == 0, "inner tiles must fill a tile");
  for (int j = 0; j < kOf; j += kEach * kNumbersEach) {
    for (int i = 0; i < kTall; i += kRows) {
      const float *left = a + i * a_row, *right = b + j;
      float* to = out + i * stride + j;
      Vector sum[kRows][kEach];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kEach; v++) sum[r][v] = bias ? *(const Vector*)(bias + j + v * kNumbersEach) : Vector{};
#pragma GCC unroll 2
      for (int64_t t = 0; t < depth; t++, left += a_step, right += b_step) {
        Vector y[kEach];
#pragma GCC unroll 2
        for (int v = 0; v < kEach; v++) y[v] = *(const Vector*)(right + v * kNumbersEach);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
          for (int v = 0; v < kEach; v++) sum[r][v] = Words::plus_product(sum[r][v], left[r * a_row], y[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kEach; v++) {
          Vector* at = (Vector*)(to + r * stride + v * kNumbersEach);
          *at = add ? *at + sum[r][v] : sum[r][v];
        }
    }
  }
}

// Prefetches a tile of out, while the sums are computed that are added to it or overwrite it.
MC_INLINE void fetch_tile(const float* out, int64_t stride) {
#pragma GCC unroll 8
  for (int i = 0; i < kTall; i++) {
    fetch(out + i * stride);
    fetch(out + i * stride + 16);
  }
}

#if defined(__AVX2__)
// The transpose of the 8 x 8 words in r.
MC_INLINE void store_transposed(__m256* r, float* to, int64_t to_stride) {
  __m256 s[8];
  for (int k = 0; k < 8; k += 2) {
    s[k] = _mm256_unpacklo_ps(r[k], r[k + 1]);
    s[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
  }
  for (int k = 0; k < 8; k += 4) {
    r[k] = _mm256_shuffle_ps(s[k], s[k + 2], 0x44);
    r[k + 1] = _mm256_shuffle_ps(s[k], s[k + 2], 0xEE);
    r[k + 2] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0x44);
    r[k + 3] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0xEE);
  }
  for (int k = 0; k < 4; k++) {
    _mm256_storeu_ps(to + k * to_stride, _mm256_permute2f128_ps(r[k], r[k + 4], 0x20));
    _mm256_storeu_ps(to + (k + 4) * to_stride, _mm256_permute2f128_ps(r[k], r[k + 4], 0x31));
  }
}

// The transpose of 8 x 8 numbers, with zeros for the rows from `rows` on.
MC_INLINE void transpose_8x8(const float* x, int64_t stride, int64_t rows, float* to, int64_t to_stride) {
  __m256 r[8];
  for (int k = 0; k < 8; k++) r[k] = k < rows ? _mm256_loadu_ps(x + k * stride) : _mm256_setzero_ps();
  store_transposed(r, to, to_stride);
}
#endif

// Columns [0, depth) of `rows` rows of x, at most kOf, as `depth` rows of kOf numbers, padded with zeros.
template <int64_t kOf>
MC_INLINE void transpose_panel(const float* x, int64_t stride, int64_t depth, int64_t rows, float* __restrict to) {
#if defined(__AVX2__)
  for (int64_t i = 0; i < kOf; i += 8) {
    const int64_t there = rows - i;
    int64_t t = 0;
    if (there >= 8)
      for (; t + 8 <= depth; t += 8) transpose_8x8(x + i * stride + t, stride, 8, to + t * kOf + i, kOf);
    else if (there > 0)
      for (; t + 8 <= depth; t += 8) transpose_8x8(x + i * stride + t, stride, there, to + t * kOf + i, kOf);
    for (; t < depth; t++) {
      float* const at = to + t * kOf + i;
      _mm256_storeu_ps(at, _mm256_setzero_ps());
      for (int64_t k = 0; k < there && k < 8; k++) at[k] = x[(i + k) * stride + t];
    }
  }
#else
  for (int64_t t = 0; t < depth; t++)
    for (int64_t k = 0; k < kOf; k++) to[t * kOf + k] = k < rows ? x[k * stride + t] : 0.0f;
#endif
}

// sums += the sums over depth of each row in packed panels of kTall rows.
MC_INLINE void add_sums(const float* a, int64_t depth, int64_t rows, float* sums) {
  for (int64_t i = 0; i < rows; i += kTall, a += kTallPanel) {
    Sixteen even{}, odd{};  // each for two rows of the panel, as an addition waits for the one before
    int64_t t = 0;
    for (; t + 4 <= depth; t += 4) {
      even += *(const Sixteen*)(a + t * kTall);
      odd += *(const Sixteen*)(a + (t + 2) * kTall);
    }
    float sum[2 * kTall];
    *(Sixteen*)sum = even + odd;
    for (; t < depth; t++)
      for (int k = 0; k < kTall; k++) sum[k] += a[t * kTall + k];
    for (int64_t k = 0; k < kTall && i + k < rows; k++) sums[i + k] += sum[k] + sum[kTall + k];
  }
}

template <int64_t kOf>
void Exact::pack(const float* x, int64_t stride, int64_t depth, int64_t columns, float* __restrict to, float* sums) {
  constexpr int64_t kPanel = kOf * kDepth + 16, kAhead = 4;
  const int64_t whole = columns / kOf, rest = columns % kOf;
  float* panel = to;
  for (int64_t t = 0; t < depth; t++, x += stride, panel += kOf) {
    if (t + kAhead < depth)  // rows are far apart, and the hardware prefetches only within a row
      for (int64_t j = 0; j < columns; j += 16) fetch(x + kAhead * stride + j);
    for (int64_t p = 0; p < whole; p++) memcpy(panel + p * kPanel, x + p * kOf, sizeof(float) * kOf);
    if (!rest) continue;
    for (int64_t j = 0; j < kOf; j++) panel[whole * kPanel + j] = j < rest ? x[whole * kOf + j] : 0.0f;
  }
  if (sums) add_sums(to, depth, columns, sums);
}

template <int64_t kOf>
void Exact::pack_rows(const float* x, int64_t stride, int64_t depth, int64_t rows, float* __restrict to, float* sums) {
  float* panel = to;
  for (int64_t i = 0; i < rows; i += kOf, x += kOf * stride, panel += kOf * kDepth + 16)
    transpose_panel<kOf>(x, stride, depth, rows - i < kOf ? rows - i : kOf, panel);
  if (sums) add_sums(to, depth, rows, sums);
}

// A block of an operand that is packed next: it is prefetched into the L2 a little at a time, while sums are computed.
struct Coming {
  const float* from;
  int64_t stride, rows, numbers, each;  // each: cache lines at a time
  int64_t at = 0;

  MC_INLINE void fetch_some() {
    for (int64_t k = 0; k < each && rows; k++) {
      __builtin_prefetch(from + at, 0, 2);
      if ((at += 16) < numbers) continue;
      at = 0, from += stride, rows--;
    }
  }
};

template <class Words>
void product(const Product& p, int64_t top, int64_t bottom, int64_t left, int64_t right, float* scratch) {
  constexpr int64_t kPacked = kDepth * Words::kSteps;  // steps of the depth that are packed together
  float* const tall = scratch;
  float* const wide = scratch + kHeight / kTall * kTallPanel;
  const bool sums = p.sums && left == 0;
  auto block_of_b = [&](int64_t t, int64_t j) {
    return p.b_transposed ? p.b + j * p.b_stride + t : p.b + t * p.b_stride + j;
  };
  // The block of b after the one at step t and column j, if there is one.
  auto next_block = [&](int64_t t, int64_t j, int64_t height) {
    if ((j += kWidth) >= right) j = left, t += kPacked;
    if (t >= p.depth) return Coming{};
    const int64_t depth = p.depth - t < kPacked ? p.depth - t : kPacked;
    const int64_t width = right - j < kWidth ? right - j : kWidth;
    Coming next{block_of_b(t, j), p.b_stride, depth, width, 0};
    if (p.b_transposed) next.rows = width, next.numbers = depth;
    const int64_t tiles = (height + kTall - 1) / kTall * (kWidth / kWide);
    const int64_t lines = next.rows * ((next.numbers + 15) / 16);
    next.each = (lines + tiles - 1) / tiles;
    return next;
  };
  if (sums) memset(p.sums + top, 0, sizeof(float) * (size_t)(bottom - top));
  for (int64_t i = top; i < bottom; i += kHeight) {
    const int64_t height = bottom - i < kHeight ? bottom - i : kHeight;
    for (int64_t t = 0; t < p.depth; t += kPacked) {
      const int64_t depth = p.depth - t < kPacked ? p.depth - t : kPacked;
      const int64_t words = (depth + Words::kSteps - 1) / Words::kSteps;
      const bool add = p.add || t;
      float* const to = sums ? p.sums + i : nullptr;
      if (p.a_transposed) Words::template pack<kTall>(p.a + t * p.a_stride + i, p.a_stride, depth, height, tall, to);
      else Words::template pack_rows<kTall>(p.a + i * p.a_stride + t, p.a_stride, depth, height, tall, to);
      for (int64_t j = left; j < right; j += kWidth) {
        const int64_t width = right - j < kWidth ? right - j : kWidth;
        const float* const from = block_of_b(t, j);
        if (p.b_transposed) Words::template pack_rows<kWide>(from, p.b_stride, depth, width, wide, nullptr);
        else Words::template pack<kWide>(from, p.b_stride, depth, width, wide, nullptr);
        Coming coming = next_block(t, j, height);
        for (int64_t x = 0; x < width; x += kWide) {
          const float* b = wide + x / kWide * kWidePanel;
          const float* bias = p.bias && !t ? p.bias + j + x : nullptr;
          for (int64_t y = 0; y < height; y += kTall) {
            const float* a = tall + y / kTall * kTallPanel;
            float* out = p.out + (i + y) * p.out_stride + j + x;
            if (y + kTall <= height && x + kWide <= width) {
              fetch_tile(out, p.out_stride);
              coming.fetch_some();
              tile<kWide, Words>(words, a, 1, kTall, b, kWide, out, p.out_stride, add, bias);
              continue;
            }
            float edge[kTall * kWide];
            tile<kWide, Words>(words, a, 1, kTall, b, kWide, edge, kWide, false);
            for (int64_t r = 0; r < kTall && y + r < height; r++)
              for (int64_t c = 0; c < kWide && x + c < width; c++) {
                float* to = out + r * p.out_stride + c;
                *to = add ? *to + edge[r * kWide + c] : bias ? bias[c] + edge[r * kWide + c] : edge[r * kWide + c];
              }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace modelcenter
