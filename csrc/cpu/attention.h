// Attention of one sequence in the heads that share a key head; part of cpu/kernels.cpp, compiled for each instruction
// set.
//
// 32 queries are processed at a time, one per lane, or 16 if no more are left, as in short sequences. Scores are stored
// as (keys, lanes), so that softmax needs no sums across a vector; hidden keys are not computed, and scores never leave
// the caches. Distances may add to scores (distances.h). As in FlashAttention (Dao et al. 2022, arXiv:2205.14135),
// backward recomputes the weights from the largest score and the sum of each query. A query's bits do not depend on the
// number of lanes.
//
// Products multiply words (products.h). If numbers are rounded (Rounded), a word holds those of two consecutive steps
// of a product, so each operand is stored in scratch memory once for each direction in which it is multiplied.
#pragma once

#include "attention_blocks.h"
#include "distances.h"
#include "dropout.h"
#include "tanh.h"

namespace modelcenter {
namespace {

// Scratch memory, as consecutive arrays, for a sequence of so many keys with heads of so many channels.
struct Scratch {
  int64_t keys, width;
  float *k, *v, *scores, *queries, *out, *bias;            // forward
  float *slopes, *grads, *rows, *dk, *dv, *dbias;          // backward
  float* steep = nullptr;                                  // also backward, if scores are capped
  // If numbers are rounded: words of keys and values along their channels and across their rows, of weights in the
  // current direction, and of queries across their rows.
  float *k_along = nullptr, *k_across = nullptr, *v_along = nullptr, *v_across = nullptr;
  float *words = nullptr, *pairs = nullptr;
  int64_t numbers;

  Scratch(float* memory, int64_t queries_, int64_t keys_, int64_t channels, bool backward, bool capped, bool rounded)
      : keys(whole(keys_, kTall)), width(whole(channels, kWide)) {
    float* next = memory;
    const auto take = [&](int64_t n) { return (next += whole(n, 16)) - whole(n, 16); };
    k = take(keys * width), v = take(keys * width), scores = take(keys * kQueries);
    queries = take(width * kQueries), out = take(kQueries * width), bias = take(queries_ + keys_ + 2 * kQueries);
    if (backward) {
      slopes = take(keys * kQueries), grads = take(width * kQueries);
      rows = take(kQueries * width);
      dk = take(keys * width), dv = take(keys * width), dbias = take(queries_ + keys_ + 2 * kQueries);
      if (capped) steep = take(keys * kQueries);
    }
    if (rounded) {
      const auto take_rows = [&] { return take(keys * width / 2); };
      k_along = take_rows(), words = take(keys * kQueries / 2);
      if (backward) k_across = take_rows(), v_along = take_rows(), pairs = take(kQueries * width / 2);
      else v_across = take_rows();
    }
    numbers = next - memory;
  }
  MC_INLINE float* words_at(int64_t n) const { return words ? words + n : nullptr; }
};

int64_t attention_scratch(int64_t queries, int64_t keys, int64_t channels, bool backward, bool capped, bool rounded) {
  return Scratch(nullptr, queries, keys, channels, backward, capped, rounded).numbers;
}

// With segments: which keys of a kind the queries of a block see, and what is added to their scores. Keys of one kind
// are mostly adjacent, so this is seldom recomputed.
template <int64_t kOf>
class Seen {
 public:
  alignas(64) int32_t last[kOf];  // the last key of this kind that the query sees; -1: none
  alignas(64) int32_t place[kOf];  // column of segment_bias that is added; -1: the bias is
  alignas(64) float added[kOf];

  // dsegment_bias: (segment_width,), to which `add` adds; null: not wanted.
  Seen(const Attention& a, const Part& p, const Block<kOf>& b, float* dsegment_bias)
      : kinds_(a.kinds), rules_(a.rules), all_(a.num_kinds), first_(b.first), to_(dsegment_bias),
        bias_(a.segment_bias ? a.segment_bias + p.head * a.segment_width : nullptr) {
    if (!kinds_) return;
    kinds_ += p.query;
    clear(sums_, kOf);
    for (int64_t l = 0; l < kOf; l++) of_[l] = kinds_[b.first + (l < b.count ? l : b.count - 1)];
  }
  MC_INLINE void at(int64_t key) {
    if (kinds_[key] != kind_) take(kinds_[key]);
  }
  // Removes leading and trailing keys that no query sees.
  void narrow(Block<kOf>& b) {
    for (; b.end > b.begin + 1; b.end--) {
      at(b.end - 1);
      if (b.end - 1 <= most_) break;
    }
    for (; b.begin + 1 < b.end; b.begin++) {
      at(b.begin);
      if (b.begin <= most_) break;
    }
    b.top = b.begin / kTall * kTall, b.bottom = whole(b.end, kTall);
  }
  // Takes the gradients of a key's scores, which are also those of the added bias.
  MC_INLINE void add(const float* __restrict slopes) {
    for (int64_t l = 0; l < kOf; l++) sums_[l] += slopes[l];
  }
  void finish() {
    if (kind_ >= 0 && to_)
      for (int64_t l = 0; l < kOf; l++)
        if (place[l] >= 0) to_[place[l]] += sums_[l];
    clear(sums_, kOf);
  }

 private:
  const int32_t *kinds_, *rules_;
  int64_t all_, first_;
  float* to_;
  const float* bias_;
  int32_t kind_ = -1, of_[kOf];
  int64_t most_ = -1;  // of `last`
  alignas(64) float sums_[kOf];

  void take(int32_t kind) {
    finish();
    kind_ = kind, most_ = -1;
    for (int64_t l = 0; l < kOf; l++) {
      const int32_t rule = rules_[of_[l] * all_ + kind];
      last[l] = rule < 0 ? -1 : rule % 2 ? (int32_t)(first_ + l) : INT32_MAX;
      place[l] = rule < 0 ? -1 : rule / 2 - 1;
      added[l] = place[l] < 0 || !bias_ ? 0.0f : bias_[place[l]];
      most_ = last[l] > most_ ? last[l] : most_;
    }
  }
};

// (keys, lanes) = the products of keys with queries. rows: words of keys along channels; queries: words across them.
template <int64_t kOf, class Words>
MC_INLINE void products_with(const float* rows, const Scratch& r, int64_t channels, const float* queries,
                             const Block<kOf>& b, float* to) {
  constexpr int64_t kSteps = Words::kSteps;
  const int64_t stride = r.width / kSteps, steps = (channels + kSteps - 1) / kSteps;
  for (int64_t j = b.top; j < b.bottom; j += kTall)
    tile<kOf, Words>(steps, rows + j * stride, stride, 1, queries, kOf, to + j * kOf, kOf, false);
}

// (lanes, width) = sums over keys of weights (keys, lanes) times rows (keys, width), both as words across keys.
template <int64_t kOf, class Words>
MC_INLINE void mix_of(const float* weights, const float* rows, const Scratch& r, const Block<kOf>& b, float* to) {
  constexpr int64_t kSteps = Words::kSteps;
  const int64_t first = b.begin / kSteps, steps = (b.end + kSteps - 1) / kSteps - first;
  for (int64_t c = 0; c < r.width; c += kWide)
    for (int64_t i = 0; i < b.count; i += kTall)
      tile<kWide, Words>(steps, weights + first * kOf + i, 1, kOf, rows + first * r.width + c, r.width,
                         to + i * r.width + c, r.width, false);
}

// (keys, width) += sums over queries of weights (keys, lanes), as words along lanes, times rows (lanes, width), as
// words across lanes.
template <int64_t kOf, class Words>
MC_INLINE void add_mix(const float* weights, const Rows& rows, const Scratch& r, const Block<kOf>& b, float* to) {
  constexpr int64_t kSteps = Words::kSteps, kStride = kOf / kSteps;
  for (int64_t c = 0; c < r.width; c += kWide)
    for (int64_t j = b.top; j < b.bottom; j += kTall)
      tile<kWide, Words>((b.count + kSteps - 1) / kSteps, weights + j * kStride, kStride, 1, rows.at + c, rows.stride,
                         to + j * r.width + c, r.width, true);
}

// The weights (keys, lanes) of the tiles of keys that a block sees, as words along lanes or across keys, in place.
template <int64_t kOf, class Words>
MC_INLINE const float* along_lanes(const float* weights, const Scratch& r, const Block<kOf>& b) {
  const int64_t at = b.top * kOf;
  return Words::along(weights + at, (b.bottom - b.top) * kOf, r.words_at(at / 2)) - at / Words::kSteps;
}
template <int64_t kOf, class Words>
MC_INLINE const float* across_keys(const float* weights, const Scratch& r, const Block<kOf>& b) {
  const int64_t at = b.top * kOf;
  return Words::across({weights + at, kOf}, b.bottom - b.top, kOf, r.words_at(at / 2)).at - at / Words::kSteps;
}

// Writes a number into a key's row of scores for the queries that do not see the key.
template <int64_t kOf>
MC_INLINE void cover(const Attention& a, const Block<kOf>& b, Seen<kOf>* seen, int64_t key, float number,
                     float* __restrict row) {
  if (seen) {
    seen->at(key);
    const int32_t now = (int32_t)key, *__restrict last = seen->last;
    for (int64_t l = 0; l < kOf; l++) row[l] = now <= last[l] ? row[l] : number;
    return;
  }
  const int from = (int)b.from(key), to = (int)b.to(a, key);
  if (from == 0 && to == kOf) return;
  for (int l = 0; l < kOf; l++) row[l] = l < from || l >= to ? number : row[l];
}

// Capped scores from products. steep: the derivative of the score with respect to the product times scale; null: not
// wanted.
template <int64_t kOf>
MC_INLINE void cap(const Attention& a, const Block<kOf>& b, float* scores, float* steep) {
  const int64_t begin = b.begin * kOf, end = b.end * kOf;
  const float before = a.scale / a.cap, after = a.cap;
  float* __restrict x = scores;
  float* __restrict slope = steep;
  for (int64_t i = begin; i < end; i += kOf) {  // one key at a time, with its tanh in registers
    alignas(64) float t[kOf];
    for (int64_t l = 0; l < kOf; l++) t[l] = tangent(x[i + l] * before);
    for (int64_t l = 0; l < kOf; l++) x[i + l] = after * t[l];
    if (slope)
      for (int64_t l = 0; l < kOf; l++) slope[i + l] = 1.0f - t[l] * t[l];
  }
}

// Scores from products: scaled, capped, with bias, and kHidden where a query does not see the key. steep: see `cap`.
template <int64_t kOf>
MC_INLINE void score(const Attention& a, const Block<kOf>& b, Seen<kOf>* seen, const float* bias, int64_t keys,
                     float* scores, float* steep) {
  const bool capped = a.cap > 0.0f;
  if (capped) cap(a, b, scores, steep);
  const float scale = capped ? 1.0f : a.scale;
  for (int64_t j = b.begin; j < b.end; j++) {
    float* __restrict row = scores + j * kOf;
    if (bias) {
      const float* __restrict add = bias + (b.first - j + keys - 1);
      if (seen) {
        seen->at(j);
        const int32_t* __restrict place = seen->place;
        const float* __restrict added = seen->added;
        for (int64_t l = 0; l < kOf; l++) row[l] = row[l] * scale + (place[l] < 0 ? add[l] : added[l]);
      } else {
        for (int64_t l = 0; l < kOf; l++) row[l] = row[l] * scale + add[l];
      }
    } else {
      for (int64_t l = 0; l < kOf; l++) row[l] *= scale;
    }
    cover(a, b, seen, j, kHidden, row);
  }
}

// Clears the weights of unseen keys in the first and the last tile of seen keys.
template <int64_t kOf>
MC_INLINE void clear_edges(const Block<kOf>& b, float* weights) {
  clear(weights + b.top * kOf, (b.begin - b.top) * kOf);
  clear(weights + b.end * kOf, (b.bottom - b.end) * kOf);
}

// Runs body(key, words, half) for each key, with the random words of the block's queries; null without dropout.
template <int64_t kOf, class Body>
MC_INLINE void each_key(const Attention& a, const Block<kOf>& b, const uint64_t (&numbers)[kOf], const Body& body) {
  if (!a.draw.threshold) {
    for (int64_t j = b.begin; j < b.end; j++) body(j, (const uint32_t*)nullptr, 0);
    return;
  }
  alignas(64) uint32_t words[kDropoutLanes][4][kOf];
  clear((float*)words, sizeof words / sizeof(float));
  int64_t drawn = -1;
  for (int64_t j = b.begin; j < b.end; j++) {
    const int64_t block = j / kDropoutBlock, channel = j % kDropoutBlock, group = channel / kDropoutLanes;
    if (block != drawn) {
      const int64_t keys = b.end - block * kDropoutBlock;  // in the block; each of the first ones has its own counter
      for (int64_t c = 0; c < kDropoutLanes && c < keys; c++)
        draw_tokens(a.draw, numbers, b.count, (uint32_t)(block * kDropoutLanes + c), words[c]);
      drawn = block;
    }
    body(j, (const uint32_t*)words[channel % kDropoutLanes][group / 2], (int)(group % 2));
  }
}

template <int64_t kOf>
MC_INLINE void drop(const Attention& a, const uint32_t* __restrict words, int half, float* __restrict row) {
  for (int64_t l = 0; l < kOf; l++) row[l] = dropped(row[l], words[l], half, a.draw.threshold, a.draw.scale);
}

// The token numbers from which a head draws for a block's queries. Lanes without a query repeat the last one.
template <int64_t kOf>
MC_INLINE void number(const Attention& a, int64_t query, const Block<kOf>& b, int64_t head,
                      uint64_t (&numbers)[kOf]) {
  for (int64_t l = 0; l < kOf; l++) {
    const int64_t i = query + b.first + (l < b.count ? l : b.count - 1);
    numbers[l] = (uint64_t)(a.tokens ? a.tokens[i] : i) + ((uint64_t)(a.first_head + head) << 20);
  }
}

// The bias by query minus key, from 1 - keys on, so that it increases with the lanes; followed by zeros.
MC_INLINE const float* reversed_bias(const Attention& a, int64_t head, int64_t queries, int64_t keys, float* scratch) {
  if (!a.bias) return nullptr;
  const float* middle = a.bias + head * a.bias_width + a.bias_width / 2;
  for (int64_t i = 0; i < queries + keys - 1; i++) scratch[i] = middle[keys - 1 - i];
  memset(scratch + queries + keys - 1, 0, sizeof(float) * kQueries);
  return scratch;
}

// The keys and values of a head as operands of products.
struct Operands {
  const float *k_along, *k_across, *v_along, *v_across;
};

template <int64_t kOf, class Words>
void attend(const Attention& a, const Part& p, int64_t first, const float* bias, const Operands& of, const Scratch& r) {
  constexpr bool kRounded = Words::kSteps > 1;
  Block<kOf> b(a, first, p.queries, p.keys);
  Seen<kOf> by_segments(a, p, b, nullptr);
  Seen<kOf>* const seen = a.kinds ? &by_segments : nullptr;
  if (seen) seen->narrow(b);
  const int64_t at = p.at(a, first), stride = p.stride(a);
  Words::template pack_rows<kOf>(a.q + at, stride, a.channels, b.count, r.queries, nullptr);
  products_with<kOf, Words>(of.k_along, r, a.channels, r.queries, b, r.scores);
  if (!kRounded && a.tables) add_distances(a, tables_of(a, false), b, r.queries, r.k, r.scores);
  score(a, b, seen, bias, p.keys, r.scores, nullptr);
  alignas(64) float most[kOf], sum[kOf], total[kOf];
  clear(total, kOf);
  for (int64_t l = 0; l < kOf; l++) most[l] = kHidden;
  for (int64_t j = b.begin; j < b.end; j++) {
    const float* __restrict row = r.scores + j * kOf;
    for (int64_t l = 0; l < kOf; l++) most[l] = row[l] > most[l] ? row[l] : most[l];
  }
  for (int64_t j = b.begin; j < b.end; j += kNumbers) {
    clear(sum, kOf);
    for (int64_t i = j; i < b.end && i < j + kNumbers; i++) {
      float* __restrict row = r.scores + i * kOf;
      for (int64_t l = 0; l < kOf; l++) row[l] = exponential<kRounded>(row[l] - most[l], 0.0f);
      cover(a, b, seen, i, 0.0f, row);
      for (int64_t l = 0; l < kOf; l++) sum[l] += row[l];
    }
    for (int64_t l = 0; l < kOf; l++) total[l] += sum[l];
  }
  if (a.draw.threshold) {
    uint64_t numbers[kOf];
    number(a, p.query, b, p.head, numbers);
    each_key(a, b, numbers, [&](int64_t j, const uint32_t* words, int half) {
      drop<kOf>(a, words, half, r.scores + j * kOf);
    });
  }
  if (kRounded) clear_edges(b, r.scores);
  mix_of<kOf, Words>(across_keys<kOf, Words>(r.scores, r, b), of.v_across, r, b, r.out);
  for (int64_t l = 0; l < b.count; l++) {
    const float share_of_sum = 1.0f / total[l];
    const float* __restrict from = r.out + l * r.width;
    float* __restrict to = a.out + at + l * stride;
    for (int64_t c = 0; c < a.channels; c++) to[c] = from[c] * share_of_sum;
    float* sums = p.sums(a, first + l);
    sums[0] = most[l], sums[1] = total[l];
  }
}

template <int64_t kOf, class Words>
void attend_backward(const Attention& a, const Part& p, int64_t first, const float* bias, bool biased,
                     float* dsegment_bias, const Operands& of, const Scratch& r) {
  constexpr bool kRounded = Words::kSteps > 1;
  Block<kOf> b(a, first, p.queries, p.keys);
  Seen<kOf> by_segments(a, p, b, dsegment_bias);
  Seen<kOf>* const seen = a.kinds ? &by_segments : nullptr;
  if (seen) seen->narrow(b);
  const int64_t at = p.at(a, first), stride = p.stride(a);
  Words::template pack_rows<kOf>(a.q + at, stride, a.channels, b.count, r.queries, nullptr);
  Words::template pack_rows<kOf>(a.grad + at, stride, a.channels, b.count, r.grads, nullptr);
  alignas(64) float most[kOf], part[kOf], delta[kOf];
  clear(most, kOf), clear(part, kOf), clear(delta, kOf);
  for (int64_t l = 0; l < b.count; l++) {
    const float* sums = p.sums(a, first + l);
    most[l] = sums[0], part[l] = 1.0f / sums[1];
    const float *g = a.grad + at + l * stride, *o = a.out + at + l * stride;
    // With gradients rounded as in the products with values, so that this is exactly the mean of those products.
    delta[l] = row_sum(a.channels, [&](int64_t c) { return Words::multiplied(g[c]) * o[c]; });
  }
  products_with<kOf, Words>(of.k_along, r, a.channels, r.queries, b, r.scores);
  if (!kRounded && a.tables) add_distances(a, tables_of(a, true), b, r.queries, r.k, r.scores);
  products_with<kOf, Words>(of.v_along, r, a.channels, r.grads, b, r.slopes);
  score(a, b, seen, bias, p.keys, r.scores, r.steep);
  uint64_t numbers[kOf];
  number(a, p.query, b, p.head, numbers);
  each_key(a, b, numbers, [&](int64_t j, const uint32_t* words, int half) {
    float* __restrict weights = r.scores + j * kOf;
    float* __restrict slopes = r.slopes + j * kOf;
    alignas(64) float before[kOf];
    for (int64_t l = 0; l < kOf; l++) weights[l] = exponential<kRounded>(weights[l] - most[l], 0.0f) * part[l];
    cover(a, b, seen, j, 0.0f, weights);
    memcpy(before, weights, sizeof before);
    if (words) {
      drop<kOf>(a, words, half, weights);
      drop<kOf>(a, words, half, slopes);
    }
    for (int64_t l = 0; l < kOf; l++) slopes[l] = before[l] * (slopes[l] - delta[l]);
    if (biased) {
      float* __restrict to = r.dbias + (b.first - j + p.keys - 1);
      if (seen) {
        const int32_t* __restrict place = seen->place;
        for (int64_t l = 0; l < kOf; l++) to[l] += place[l] < 0 ? slopes[l] : 0.0f;
      } else {
        for (int64_t l = 0; l < kOf; l++) to[l] += slopes[l];
      }
    }
    if (dsegment_bias) seen->add(slopes);
    for (int64_t l = 0; l < kOf; l++) slopes[l] *= a.scale;
  });
  if (seen) seen->finish();
  if (a.cap > 0.0f) {
    float* __restrict slopes = r.slopes;
    const float* __restrict steep = r.steep;
    for (int64_t i = b.begin * kOf; i < b.end * kOf; i++) slopes[i] *= steep[i];
  }
  clear_edges(b, r.scores);
  clear_edges(b, r.slopes);
  const Rows grads = rows_of(a.grad + at, stride, a.channels, b.count, r.width, r.rows);
  const Rows grads_across = Words::across(grads, b.count, r.width, r.pairs);
  add_mix<kOf, Words>(along_lanes<kOf, Words>(r.scores, r, b), grads_across, r, b, r.dv);
  const Rows rows = rows_of(a.q + at, stride, a.channels, b.count, r.width, r.rows);
  const Rows rows_across = Words::across(rows, b.count, r.width, r.pairs);
  add_mix<kOf, Words>(along_lanes<kOf, Words>(r.slopes, r, b), rows_across, r, b, r.dk);
  mix_of<kOf, Words>(across_keys<kOf, Words>(r.slopes, r, b), of.k_across, r, b, r.out);
  if (!kRounded && a.tables) add_gradients_of_distances(a, tables_of(a, true), b, r.slopes, rows, r.k, r.dk, r.out);
  for (int64_t l = 0; l < b.count; l++) move(r.out + l * r.width, a.channels, a.dq + at + l * stride);
}

// Computes out for queries [query, query + queries) and keys [key, key + keys) in the heads that share key head
// `group`.
template <class Words>
void attention(const Attention& a, int64_t query, int64_t queries, int64_t key, int64_t keys, int64_t group,
               float* scratch) {
  const Scratch r(scratch, queries, keys, a.channels, false, a.cap > 0.0f, Words::kSteps > 1);
  const int64_t share = a.heads / a.kv_heads, k_stride = a.kv_heads * a.channels;
  const int64_t k_at = key * k_stride + group * a.channels;
  copy_head(a.k + k_at, k_stride, a.channels, keys, r.width, r.keys, r.k);
  copy_head(a.v + k_at, k_stride, a.channels, keys, r.width, r.keys, r.v);
  const Operands of{Words::along(r.k, r.keys * r.width, r.k_along), nullptr, nullptr,
                    Words::across({r.v, r.width}, r.keys, r.width, r.v_across).at};
  for (int64_t head = group * share; head < (group + 1) * share; head++) {
    const Part p{query, queries, keys, head};
    const float* bias = reversed_bias(a, head, queries, keys, r.bias);
    for (int64_t first = 0; first < queries; first += kQueries) {
      if (queries - first > kFew) attend<kQueries, Words>(a, p, first, bias, of, r);
      else attend<kFew, Words>(a, p, first, bias, of, r);
    }
  }
}

// The gradients of q, k, v and the bias for a.grad, the gradient of a.out. dbias: (heads, queries + keys - 1), by query
// minus key, from 1 - keys on; null without a bias. dsegment_bias: (heads, segment_width), to which this sequence adds;
// or null.
template <class Words>
void attention_backward(const Attention& a, int64_t query, int64_t queries, int64_t key, int64_t keys, int64_t group,
                        float* dbias, float* dsegment_bias, float* scratch) {
  const Scratch r(scratch, queries, keys, a.channels, true, a.cap > 0.0f, Words::kSteps > 1);
  const int64_t share = a.heads / a.kv_heads, k_stride = a.kv_heads * a.channels;
  const int64_t k_at = key * k_stride + group * a.channels, differences = queries + keys - 1;
  copy_head(a.k + k_at, k_stride, a.channels, keys, r.width, r.keys, r.k);
  copy_head(a.v + k_at, k_stride, a.channels, keys, r.width, r.keys, r.v);
  const Operands of{Words::along(r.k, r.keys * r.width, r.k_along),
                    Words::across({r.k, r.width}, r.keys, r.width, r.k_across).at,
                    Words::along(r.v, r.keys * r.width, r.v_along), nullptr};
  memset(r.dk, 0, sizeof(float) * (size_t)(r.keys * r.width));
  memset(r.dv, 0, sizeof(float) * (size_t)(r.keys * r.width));
  for (int64_t head = group * share; head < (group + 1) * share; head++) {
    const Part p{query, queries, keys, head};
    const float* bias = reversed_bias(a, head, queries, keys, r.bias);
    if (dbias) memset(r.dbias, 0, sizeof(float) * (size_t)(differences + kQueries));
    float* const to = dsegment_bias ? dsegment_bias + head * a.segment_width : nullptr;
    for (int64_t first = 0; first < queries; first += kQueries) {
      if (queries - first > kFew) attend_backward<kQueries, Words>(a, p, first, bias, dbias != nullptr, to, of, r);
      else attend_backward<kFew, Words>(a, p, first, bias, dbias != nullptr, to, of, r);
    }
    if (dbias) memcpy(dbias + head * differences, r.dbias, sizeof(float) * (size_t)differences);
  }
  for (int64_t j = 0; j < keys; j++) {
    move(r.dk + j * r.width, a.channels, a.dk + k_at + j * k_stride);
    move(r.dv + j * r.width, a.channels, a.dv + k_at + j * k_stride);
  }
}

}  // namespace
}  // namespace modelcenter
