// Products of fp32 matrices, and attention, with numbers rounded to bf16 when they are packed, and sums and everything
// else in fp32, as torch.set_float32_matmul_precision("medium") allows. For CPUs with AVX512_BF16, which multiply twice
// as many of them.
#include "kernels.h"
#if defined(__AVX512BF16__)
#include "attention.h"
#include "products.h"
#endif

namespace modelcenter {

#if defined(__AVX512BF16__)
namespace {

// Two numbers per word, of one step and of the next: the instruction adds the products of both to a sum.
struct Rounded {
  static constexpr int64_t kSteps = 2;

  static MC_INLINE Vector plus_product(Vector sum, float x, Vector y) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)y);
  }

  // Words from sixteen numbers of each of two steps.
  static MC_INLINE __m512i words(__m512 first, __m512 second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }

  static MC_INLINE __mmask16 up_to(int64_t n) { return n >= 16 ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

  // The sums are those of the numbers before rounding.
  template <int64_t kOf>
  static void pack(const float* x, int64_t stride, int64_t depth, int64_t columns, float* __restrict to, float* sums) {
    constexpr int64_t kPanel = kOf * kDepth + 16, kAhead = 4;
    static_assert(kOf == 8 || kOf % 16 == 0, "sixteen columns are parts of one panel, or two panels");
    alignas(64) float block[kHeight];  // sums of these steps, as long fp32 sums lose less this way
    const int64_t up = (columns + 15) / 16 * 16, end = kOf == 8 ? up : (columns + kOf - 1) / kOf * kOf;
    if (sums) memset(block, 0, sizeof(float) * (size_t)up);
    for (int64_t t = 0; t < depth; t += 2, x += 2 * stride, to += kOf) {
      const bool both = t + 1 < depth;
      for (int64_t row = kAhead; row < kAhead + 2 && t + row < depth; row++)
        for (int64_t j = 0; j < columns; j += 16) fetch(x + row * stride + j);
      for (int64_t j = 0; j < end; j += 16) {
        const __mmask16 there = up_to(columns - j);
        const __m512 first = _mm512_maskz_loadu_ps(there, x + j);
        const __m512 second = both ? _mm512_maskz_loadu_ps(there, x + stride + j) : _mm512_setzero_ps();
        const __m512i made = words(first, second);
        if (kOf == 8) {
          _mm256_storeu_si256((__m256i*)(to + j / 8 * kPanel), _mm512_castsi512_si256(made));
          if (j + 8 < columns)
            _mm256_storeu_si256((__m256i*)(to + (j / 8 + 1) * kPanel), _mm512_extracti64x4_epi64(made, 1));
        } else {
          _mm512_storeu_si512(to + j / kOf * kPanel + j % kOf, made);
        }
        if (sums && kOf == 8)
          _mm512_store_ps(block + j, _mm512_add_ps(_mm512_load_ps(block + j), _mm512_add_ps(first, second)));
      }
    }
    if (sums)
      for (int64_t j = 0; j < columns; j++) sums[j] += block[j];
  }

  template <int64_t kOf>
  static void pack_rows(const float* x, int64_t stride, int64_t depth, int64_t rows, float* __restrict to, float* sums) {
    for (int64_t i = 0; i < rows; i += kOf, to += kOf * kDepth + 16)
      for (int64_t k = 0; k < kOf; k += 8)
        for (int64_t t = 0; t < depth; t += 16) {
          const __mmask16 there = up_to(depth - t);
          __m256 r[8];
          for (int64_t q = 0; q < 8; q++) {
            const int64_t row = i + k + q;
            if (row + 8 < rows) fetch(x + (row + 8) * stride + t);
            r[q] = row < rows ? (__m256)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, x + row * stride + t))
                              : _mm256_setzero_ps();
          }
          store_transposed(r, to + t / 2 * kOf + k, kOf);
        }
    if (sums)
      for (int64_t i = 0; i < rows; i++) sums[i] += row_sum(depth, [&](int64_t t) { return x[i * stride + t]; });
  }

  static MC_INLINE float multiplied(float x) {
    const uint32_t bits = bits_of(x);
    return float_of((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
  }

  static MC_INLINE const float* along(const float* x, int64_t n, float* __restrict to) {
    for (int64_t i = 0; i < n; i += 16)
      _mm256_storeu_si256((__m256i*)(to + i / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
    return to;
  }

  static MC_INLINE Rows across(const Rows& x, int64_t rows, int64_t width, float* __restrict to) {
    for (int64_t i = 0; i < rows; i += 2)
      for (int64_t j = 0; j < width; j += 16) {
        const float* from = x.at + i * x.stride + j;
        const __m512 second = i + 1 < rows ? _mm512_loadu_ps(from + x.stride) : _mm512_setzero_ps();
        _mm512_storeu_si512(to + i / 2 * width + j, words(_mm512_loadu_ps(from), second));
      }
    return {to, width};
  }
};

constexpr RoundedKernels kRounded = {product<Rounded>, attention<Rounded>, attention_backward<Rounded>};

}  // namespace

const RoundedKernels* rounded() {
  static const bool there = __builtin_cpu_supports("avx512bf16") && kernels().product == kernels_avx512().product;
  return there ? &kRounded : nullptr;
}
#else
const RoundedKernels* rounded() { return nullptr; }
#endif

}  // namespace modelcenter
