// Compiled once for each instruction set, with its flags and its name in MC_ISA. Other code must not get inline
// functions that were compiled for this instruction set, so everything but one table is internal, and headers that
// could leave some are not included.
#include "kernels.h"

#include "../core/quantize.h"
#include "convert.h"

#define MC_JOIN(a, b) a##b
#define MC_NAME(isa) MC_JOIN(kernels_, isa)
#define MC_TEXT(x) #x
#define MC_STRING(x) MC_TEXT(x)

namespace modelcenter {
namespace {

template <class Formula>
MC_INLINE void formula(const Scalars s, float scale, const float* __restrict g, float* __restrict w,
                       float* __restrict m, float* __restrict v, int64_t n) {
  if (Formula::kMoments == 2) {
    each(n, [=](int64_t i) { Formula::update(s, g[i] * scale, w[i], m[i], v[i]); });
  } else {
    each(n, [=](int64_t i) {
      float none = 0.0f;
      Formula::update(s, g[i] * scale, w[i], m[i], none);
    });
  }
}

// Cuts elements [first, first + n) of a shard into runs whose places in the whole tensor are consecutive and share
// their upper 32 bits, and calls body(offset, length, lower bits of the first, upper bits) for each: 32-bit arithmetic
// takes half as many vectors.
template <class Body>
MC_INLINE void for_runs(const Place& place, int64_t first, int64_t n, const Body& body) {
  for (int64_t i = 0; i < n;) {
    const uint64_t here = place_of(place, first + i);
    const int64_t same = ((int64_t)1 << 32) - (int64_t)(here & 0xFFFFFFFFu);
    const int64_t row = place.inner - (first + i) % place.inner, left = n - i;
    const int64_t run = row < same ? (row < left ? row : left) : (same < left ? same : left);
    body(i, run, (uint32_t)here, (uint32_t)(here >> 32));
    i += run;
  }
}

// The fp32 values of parameters, in place or in `scratch`.
MC_INLINE float* values(const Slab& slab, const Types& types, int64_t i, float* __restrict scratch, int64_t n) {
  if (types.mode == kPlain) return (float*)slab.p + i;
  if (types.mode == kMaster) return (float*)slab.aux + i;
  const uint16_t* __restrict p = (const uint16_t*)slab.p + i;
  const int16_t* __restrict low = (const int16_t*)slab.aux + i;
  if (types.mode == kRemainder) {
    each(n, [=](int64_t k) { scratch[k] = merge(p[k], low[k]); });
  } else {
    to_floats(p, kBfloat16, scratch, n);
  }
  return scratch;
}

// Writes the new values to the parameters.
MC_INLINE void keep_values(const Slab& slab, const Types& types, int64_t i, const float* __restrict w, uint32_t salt,
                           int64_t n) {
  uint16_t* __restrict p = (uint16_t*)slab.p + i;
  int16_t* __restrict low = (int16_t*)slab.aux + i;
  if (types.mode == kMaster) from_floats(w, place(slab.p, types.p, i), types.p, n);
  if (types.mode == kRemainder) each(n, [=](int64_t k) { split(w[k], p[k], low[k]); });
  if (types.mode == kRandom)
    for_runs(slab.place, i, n, [=](int64_t offset, int64_t length, uint32_t low_place, uint32_t high_place) {
      const float* __restrict x = w + offset;
      uint16_t* __restrict out = p + offset;
      for (int64_t k = 0; k < length; k++)
        out[k] = to_bf16_at_random(x[k], salt, low_place + (uint32_t)k, high_place);
    });
}

MC_INLINE float load(float x) { return x; }
MC_INLINE float load(uint16_t x) { return from_bf16(x); }
MC_INLINE void store(float& to, float x) { to = x; }
MC_INLINE void store(uint16_t& to, float x) { to = to_bf16(x); }

MC_INLINE uint32_t bits(float x) { return bits_of(x); }
MC_INLINE uint32_t bits(uint16_t x) { return x; }

// Whether no gradient has reached n parameters yet, such as a row of a table that has not been looked up. A step then
// only decays them: moments that have never been written take no memory, nor time to read it. One loop covers all
// arrays: calling `are_zeros` for each takes a tenth to a quarter longer for a table.
template <class Formula, class Gradient, class Moment>
MC_INLINE bool untouched(const Gradient* __restrict g, const Moment* __restrict m, const Moment* __restrict v,
                         int64_t n) {
  if (bits(g[0])) return false;  // mostly, if some are not zero
  uint32_t some = 0;
  for (int64_t i = 0; i < n; i++) some |= bits(g[i]) | bits(m[i]) | (Formula::kMoments == 2 ? bits(v[i]) : 0);
  return !some;
}

// Without decay only denormals change, and without these nothing is written.
MC_INLINE void decay(float* __restrict w, float by, int64_t n) {
  uint32_t changed = 0;
  for (int64_t i = 0; i < n; i++) changed |= bits(w[i] * by) ^ bits(w[i]);
  if (!changed) return;
  for (int64_t i = 0; i < n; i++) w[i] *= by;
}

// Steps in one pass over memory, without scratch memory, which would be slower than memory itself.

// Elements [begin, end) in fp32.
template <class Formula>
MC_INLINE void plain(const Slab& slab, const Scalars s, float scale, int64_t begin, int64_t end) {
  const float* __restrict g = (const float*)slab.g + begin;
  float* __restrict w = (float*)slab.p + begin;
  float* __restrict m = (float*)slab.m + begin;
  float* __restrict v = (float*)slab.v + begin;
  const bool asks = !kAmd, rests = Formula::rests(s, scale);
  in_strips(end - begin, [=](int64_t from, int64_t to) {
    if (asks) {
      ask_ahead(g + from, kStrip), ask_ahead(w + from, kStrip), ask_ahead(m + from, kStrip);
      if (Formula::kMoments == 2) ask_ahead(v + from, kStrip);
    }
    if (rests && untouched<Formula>(g + from, m + from, v + from, to - from)) {
      decay(w + from, s.decay, to - from);
      return;
    }
    formula<Formula>(s, scale, g + from, w + from, m + from, v + from, to - from);
  });
}

// n elements from i on of bf16 parameters whose fp32 values are not in memory.
template <class Formula, class Moment, bool kRandomly>
MC_INLINE void one_pass(const Slab& slab, const Scalars s, float scale, int64_t i, int64_t n, uint32_t salt,
                        uint32_t low_place, uint32_t high_place) {
  const uint16_t* __restrict g = (const uint16_t*)slab.g + i;
  uint16_t* __restrict p = (uint16_t*)slab.p + i;
  int16_t* __restrict low = (int16_t*)slab.aux + i;
  Moment* __restrict m = (Moment*)slab.m + i;
  Moment* __restrict v = (Moment*)slab.v + i;
  const bool rests = Formula::rests(s, scale);
  const auto value = [=](int64_t k) { return kRandomly ? from_bf16(p[k]) : merge(p[k], low[k]); };
  const auto keep = [=](int64_t k, float w) {
    if (kRandomly) {
      p[k] = to_bf16_at_random(w, salt, low_place + (uint32_t)k, high_place);
    } else {
      split(w, p[k], low[k]);
    }
  };
  in_strips(n, [=](int64_t from, int64_t to) {
    ask_ahead(g + from, kStrip), ask_ahead(p + from, kStrip), ask_ahead(m + from, kStrip);
    if (Formula::kMoments == 2) ask_ahead(v + from, kStrip);
    if (!kRandomly) ask_ahead(low + from, kStrip);
    if (rests && untouched<Formula>(g + from, m + from, v + from, to - from)) {
      for (int64_t k = from; k < to; k++) keep(k, value(k) * s.decay);
      return;
    }
    for (int64_t k = from; k < to; k++) {
      float w = value(k), first = load(m[k]), second = 0.0f;
      if (Formula::kMoments == 2) second = load(v[k]);
      Formula::update(s, from_bf16(g[k]) * scale, w, first, second);
      store(m[k], first);
      if (Formula::kMoments == 2) store(v[k], second);
      keep(k, w);
    }
  });
}

// n elements from i on of masters, whose bf16 parameters are written to p.
template <class Formula, class Gradient, class Moment>
MC_INLINE void masters(const Slab& slab, const Scalars s, float scale, int64_t i, int64_t n, uint16_t* __restrict p) {
  const Gradient* __restrict g = (const Gradient*)slab.g + i;
  float* __restrict w = (float*)slab.aux + i;
  Moment* __restrict m = (Moment*)slab.m + i;
  Moment* __restrict v = (Moment*)slab.v + i;
  const bool rests = Formula::rests(s, scale);
  in_strips(n, [=](int64_t from, int64_t to) {
    ask_ahead(g + from, kStrip), ask_ahead(w + from, kStrip), ask_ahead(m + from, kStrip);
    if (Formula::kMoments == 2) ask_ahead(v + from, kStrip);
    if (rests && untouched<Formula>(g + from, m + from, v + from, to - from)) {
      for (int64_t k = from; k < to; k++) p[k] = to_bf16(w[k] *= s.decay);
      return;
    }
    for (int64_t k = from; k < to; k++) {
      float value = w[k], first = load(m[k]), second = 0.0f;
      if (Formula::kMoments == 2) second = load(v[k]);
      Formula::update(s, load(g[k]) * scale, value, first, second);
      store(m[k], first);
      if (Formula::kMoments == 2) store(v[k], second);
      w[k] = value;
      p[k] = to_bf16(value);
    }
  });
}

constexpr int64_t kRun = 256;

// Parameters with masters are only written: stores that bypass the caches save reading the line first, which is 2 of
// the 30 bytes that a step moves per parameter. Lines are written whole.
template <class Formula, class Gradient, class Moment>
MC_INLINE void all_masters(const Slab& slab, const Scalars s, float scale, int64_t begin, int64_t end, bool stream) {
  uint16_t* p = (uint16_t*)slab.p;
  int64_t i = begin;
#if defined(__AVX2__)
  if (stream && end - begin >= 2 * kRun) {
    alignas(64) uint16_t scratch[kRun];
    const int64_t before = (int64_t)(-(uintptr_t)(p + begin) & 63) / 2;
    masters<Formula, Gradient, Moment>(slab, s, scale, i, before, p + i);
    for (i += before; i + kRun <= end; i += kRun) {
      masters<Formula, Gradient, Moment>(slab, s, scale, i, kRun, scratch);
      for (int64_t k = 0; k < kRun; k += 16)
        _mm256_stream_si256((__m256i*)(p + i + k), _mm256_load_si256((const __m256i*)(scratch + k)));
    }
    _mm_sfence();
  }
#endif
  masters<Formula, Gradient, Moment>(slab, s, scale, i, end - i, p + i);
}

template <class Formula, class Moment>
MC_INLINE bool in_one_pass(const Slab& slab, const Types& types, const Scalars& s, float scale, uint32_t salt,
                           int64_t begin, int64_t end) {
  if (types.mode == kPlain && types.g == kFloat && sizeof(Moment) == sizeof(float)) {
    plain<Formula>(slab, s, scale, begin, end);
    return true;
  }
  if (types.p != kBfloat16 || types.g == kHalf) return false;
  if (types.mode == kMaster && types.g == kFloat) {
    all_masters<Formula, float, Moment>(slab, s, scale, begin, end, types.stream);
  } else if (types.g == kFloat) {
    return false;
  } else if (types.mode == kMaster) {
    all_masters<Formula, uint16_t, Moment>(slab, s, scale, begin, end, types.stream);
  } else if (types.mode == kRemainder) {
    one_pass<Formula, Moment, false>(slab, s, scale, begin, end - begin, 0, 0, 0);
  } else if (types.mode == kRandom && slab.place.inner >= kBlock) {  // short runs would not fill vectors
    for_runs(slab.place, begin, end - begin, [&](int64_t offset, int64_t n, uint32_t low_place, uint32_t high_place) {
      one_pass<Formula, Moment, true>(slab, s, scale, begin + offset, n, salt, low_place, high_place);
    });
  } else {
    return false;
  }
  return true;
}

template <class Formula>
void update(const Slab& slab, const Types& types, const Scalars& s, float scale, uint32_t salt, int64_t begin,
            int64_t end) {
  if (types.m == kFloat ? in_one_pass<Formula, float>(slab, types, s, scale, salt, begin, end)
                        : in_one_pass<Formula, uint16_t>(slab, types, s, scale, salt, begin, end))
    return;
  alignas(64) float scratch_g[kBlock], scratch_w[kBlock], scratch_m[kBlock], scratch_v[kBlock];
  const bool second = Formula::kMoments == 2, rests = Formula::rests(s, scale);
  const auto zeros = [&](const void* x, int type, int64_t i, int64_t n) {
    return are_zeros(place(x, type, i), n * size_of(type));
  };
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    if (rests && zeros(slab.g, types.g, i, n) && zeros(slab.m, types.m, i, n) &&
        (!second || zeros(slab.v, types.m, i, n))) {
      float* w = values(slab, types, i, scratch_w, n);
      decay(w, s.decay, n);
      keep_values(slab, types, i, w, salt, n);
      continue;
    }

    const float* g = floats(slab.g, types.g, i, scratch_g, n);
    float* m = floats(slab.m, types.m, i, scratch_m, n);
    float* v = second ? floats(slab.v, types.m, i, scratch_v, n) : scratch_v;
    float* w = values(slab, types, i, scratch_w, n);

    formula<Formula>(s, scale, g, w, m, v, n);

    if (types.m != kFloat) {
      from_floats(m, place(slab.m, types.m, i), types.m, n);
      if (second) from_floats(v, place(slab.v, types.m, i), types.m, n);
    }
    keep_values(slab, types, i, w, salt, n);
  }
}

void update8(const Slab& slab, const Types& types, const Scalars& s, float scale, uint32_t salt, int64_t begin,
             int64_t end) {
  alignas(64) float scratch_g[kQuantBlock], scratch_w[kQuantBlock], m[kQuantBlock], v[kQuantBlock];
  alignas(64) uint32_t random[kQuantBlock];
  const int64_t per_row = (slab.width + kQuantBlock - 1) / kQuantBlock;
  for (int64_t b = begin; b < end; b++) {
    const int64_t column = b % per_row * kQuantBlock, i = b / per_row * slab.width + column;
    const int64_t n = slab.width - column < kQuantBlock ? slab.width - column : kQuantBlock;
    uint8_t* __restrict first = (uint8_t*)slab.m + i;
    uint8_t* __restrict second = (uint8_t*)slab.v + i;
    const float m_scale = slab.m_scale[b], v_scale = slab.v_scale[b];
    for (int64_t k = 0; k < n; k++) m[k] = from_first(first[k], m_scale);
    for (int64_t k = 0; k < n; k++) v[k] = from_second(second[k], v_scale);
    const float* g = floats(slab.g, types.g, i, scratch_g, n);
    float* w = values(slab, types, i, scratch_w, n);

    formula<AdamW>(s, scale, g, w, m, v, n);

    keep_values(slab, types, i, w, salt, n);
    uint32_t most_m = 0, most_v = 0;
    for (int64_t k = 0; k < n; k++) {
      const uint32_t a = bits_of(m[k]) & 0x7FFFFFFFu, c = bits_of(v[k]) & 0x7FFFFFFFu;
      most_m = a > most_m ? a : most_m;
      most_v = c > most_v ? c : most_v;
    }
    slab.m_scale[b] = scale_of(most_m);
    slab.v_scale[b] = scale_of(most_v);
    const float by_m = divisor_of(slab.m_scale[b]), by_v = divisor_of(slab.v_scale[b]);
    const uint64_t here = place_of(slab.place, i);
    for (int64_t k = 0; k < n; k++) {
      const uint64_t at = here + (uint64_t)k;
      random[k] = random_of(salt, (uint32_t)at, (uint32_t)(at >> 32));
    }
    for (int64_t k = 0; k < n; k++) first[k] = to_first(m[k], by_m);
    for (int64_t k = 0; k < n; k++) second[k] = to_second(v[k], by_v, random[k]);
  }
}

// Adds the squares of n numbers to the sums of a chunk. n is a multiple of kSums, except at the end of the chunk.
constexpr int64_t kSums = 16;

MC_INLINE void add_squares(const float* __restrict g, int64_t n, double* __restrict sums) {
  double now[kSums];
  for (int64_t lane = 0; lane < kSums; lane++) now[lane] = sums[lane];
  int64_t k = 0;
  for (; k + kSums <= n; k += kSums)
    for (int64_t lane = 0; lane < kSums; lane++) now[lane] += (double)g[k + lane] * (double)g[k + lane];
  for (; k < n; k++) now[k % kSums] += (double)g[k] * (double)g[k];
  for (int64_t lane = 0; lane < kSums; lane++) sums[lane] = now[lane];
}

// For kTogether chunks of n numbers at once, a few numbers of each in turn: a core reads several streams of memory a
// third faster than one after the other.
template <int64_t kTogether>
void squares_of(const void* x, int type, int64_t first, int64_t n, double* total) {
  alignas(64) float scratch[kStrip];
  alignas(64) double sums[kTogether][kSums] = {};
  for (int64_t i = 0; i < n; i += kStrip) {
    const int64_t count = n - i < kStrip ? n - i : kStrip;
    for (int64_t c = 0; c < kTogether; c++) {
      const int64_t at = first + c * n + i;
      ask_ahead(place(x, type, at), kStrip * size_of(type));
      if (are_zeros(place(x, type, at), count * size_of(type))) continue;
      add_squares(floats(x, type, at, scratch, count), count, sums[c]);
    }
  }
  for (int64_t c = 0; c < kTogether; c++) {
    for (int64_t width = kSums / 2; width; width /= 2)
      for (int64_t lane = 0; lane < width; lane++) sums[c][lane] += sums[c][lane + width];
    total[c] = sums[c][0];
  }
}

void squares(const void* x, int type, int64_t n, double* total) {
  int64_t i = 0;
  for (; i + kSquared * kChunk <= n; i += kSquared * kChunk, total += kSquared)
    squares_of<kSquared>(x, type, i, kChunk, total);
  for (; i < n; i += kChunk) squares_of<1>(x, type, i, n - i < kChunk ? n - i : kChunk, total++);
}

void cast(void* out, int out_type, const void* in, int in_type, float scale, int64_t n) {
  alignas(64) float scratch[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = n - i < kBlock ? n - i : kBlock;
    to_floats(place(in, in_type, i), in_type, scratch, count);
    if (scale != 1.0f) each(count, [&](int64_t k) { scratch[k] *= scale; });
    from_floats(scratch, place(out, out_type, i), out_type, count);
  }
}

void split_all(const float* x, uint16_t* __restrict high, int16_t* __restrict low, int64_t n) {
  for (int64_t i = 0; i < n; i++) split(x[i], high[i], low[i]);
}

void merge_all(const uint16_t* high, const int16_t* low, float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = merge(high[i], low[i]);
}

}  // namespace
}  // namespace modelcenter

#include "activation.h"
#include "bytes.h"
#include "dropout.h"
#include "attention.h"
#include "few_rows.h"
#include "loss.h"
#include "norm.h"
#include "products.h"
#include "rotary.h"

namespace modelcenter {
namespace {

const CpuKernels kTable = {MC_STRING(MC_ISA), {update<AdamW>, update<Lion>, update<Momentum>}, update8, squares, cast,
                           split_all, merge_all, dropout, activation, activation_backward, rotate, norm,
                           norm_backward, cross_entropy, product<Exact>, product_of_few, kFewRows, kFewRowsOfGroups,
                           attention_scratch, attention<Exact>, attention_backward<Exact>, distances_scratch,
                           distances_begin, distances_end, transpose, clear_pages, copy_pages, crc32, sha256};

}  // namespace

const CpuKernels& MC_NAME(MC_ISA)() { return kTable; }

}  // namespace modelcenter
