// Attention of packed sequences: checks of the arguments, and the distribution of sequences and heads to threads.
#pragma once
#include <cmath>
#include <memory>

#include "arrays.h"
#include "kernels.h"

namespace modelcenter {
namespace {

// The arguments of a call, and its units: a sequence and a key head each, which a thread processes at a time.
struct AttentionCall {
  Attention a{};
  std::vector<int64_t> queries, keys;  // where each sequence begins
  std::vector<int64_t> cost;           // of all units before each unit
  std::vector<int64_t> kinds, rules;   // with segments: kinds of each sequence, and where its rules begin
  bool rounds = false;

  int64_t units() const { return (int64_t)cost.size() - 1; }
  int64_t sequence(int64_t unit) const { return unit / a.kv_heads; }
  int64_t length(const std::vector<int64_t>& of, int64_t i) const { return of[(size_t)i + 1] - of[(size_t)i]; }
};

inline std::vector<int64_t> offsets(const Tensor& cu, const char* name, int64_t rows) {
  STD_TORCH_CHECK(cu.dim() == 1 && cu.scalar_type() == ScalarType::Int && cu.is_contiguous() && cu.numel() > 0 &&
                      cu.is_cpu(),
                  name, " must be contiguous int32 offsets");
  const int32_t* from = (const int32_t*)cu.const_data_ptr();
  std::vector<int64_t> to(from, from + cu.numel());
  STD_TORCH_CHECK(to.front() == 0 && to.back() == rows, name, " must rise from 0 to ", rows, ", the number of rows");
  for (size_t i = 1; i < to.size(); i++) STD_TORCH_CHECK(to[i] >= to[i - 1], name, " must not fall");
  return to;
}

struct AttentionHeads {
  int64_t heads, kv_heads;
  double scale;
  bool causal;
  int64_t window;
  double cap;
  bool may_round;  // numbers may be rounded to bf16 before they are multiplied, if that is faster
};

struct AttentionDraw {
  int64_t key, site, first_head, threshold;
};

struct AttentionSegments {
  const std::optional<Tensor>&kinds, &rules, &counts, &bias;
};

inline const int32_t* integers(const Tensor& t, const char* name, int64_t numel) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.numel() == numel && t.is_contiguous() && t.is_cpu(), name,
                  " must be ", numel, " contiguous int32 numbers");
  return (const int32_t*)t.const_data_ptr();
}

// Segments, see kernels.h. counts: the number of kinds of each sequence; the sequences' rules are adjacent.
inline void check_segments(AttentionCall& call, Arrays& arrays, const AttentionSegments& s) {
  Attention& a = call.a;
  STD_TORCH_CHECK(s.rules && s.counts, "kinds needs rules and counts");
  STD_TORCH_CHECK(call.queries == call.keys && !a.causal, "segments are of each sequence to itself, and not causal");
  const int64_t sequences = (int64_t)call.queries.size() - 1;
  const int32_t* counts = integers(*s.counts, "counts", sequences);
  a.kinds = integers(*s.kinds, "kinds", call.queries.back());
  call.rules.assign(1, 0);
  for (int64_t i = 0; i < sequences; i++) {
    STD_TORCH_CHECK(counts[i] >= 0, "counts must not be negative");
    call.kinds.push_back(counts[i]);
    call.rules.push_back(call.rules.back() + (int64_t)counts[i] * counts[i]);
    for (int64_t t = call.queries[(size_t)i]; t < call.queries[(size_t)i + 1]; t++)
      STD_TORCH_CHECK(a.kinds[t] >= 0 && a.kinds[t] < counts[i], "kinds: ", a.kinds[t], " of sequence ", i,
                      ", which has ", counts[i]);
  }
  if (s.bias) {
    STD_TORCH_CHECK(s.bias->dim() == 2 && s.bias->size(0) == a.heads && a.bias, "segment_bias must be (", a.heads,
                    ", ...), beside a bias");
    a.segment_width = s.bias->size(1);
    a.segment_bias = arrays.take(*s.bias, "segment_bias", a.heads * a.segment_width);
  }
  a.rules = integers(*s.rules, "rules", call.rules.back());
  int32_t most = -1;
  for (int64_t r = 0; r < call.rules.back(); r++) most = std::max(most, a.rules[r]);
  STD_TORCH_CHECK(most < 0 || most / 2 <= a.segment_width, "rules: place ", most / 2 - 1, " of segment_bias, which has ",
                  a.segment_width);
}

inline AttentionCall check_attention(Arrays& arrays, const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& sums, bool written, const Tensor& cu_queries, const Tensor& cu_keys,
                                     const std::optional<Tensor>& bias, const std::optional<Tensor>& tokens,
                                     const AttentionHeads& h, const AttentionDraw& draw,
                                     const AttentionSegments& segments) {
  STD_TORCH_CHECK(q.dim() == 2 && k.dim() == 2 && v.dim() == 2, "q, k and v must have 2 dimensions");
  STD_TORCH_CHECK(h.kv_heads > 0 && h.heads > 0 && h.heads % h.kv_heads == 0 && q.size(1) % h.heads == 0,
                  "rows of ", q.size(1), " numbers are no ", h.heads, " heads of ", h.kv_heads, " kv_heads");
  AttentionCall call;
  Attention& a = call.a;
  a.heads = h.heads, a.kv_heads = h.kv_heads, a.channels = q.size(1) / h.heads;
  a.scale = (float)h.scale, a.causal = h.causal, a.window = h.window, a.first_head = draw.first_head;
  a.cap = (float)h.cap;
  call.rounds = h.may_round && rounded();
  STD_TORCH_CHECK(a.cap >= 0.0f && std::isfinite(a.cap), "cap is ", h.cap, ", no positive number, and not 0 for none");
  const int64_t rows = q.size(0), key_rows = k.size(0);
  a.q = arrays.take(q, "q", rows * a.heads * a.channels);
  a.k = arrays.take(k, "k", key_rows * a.kv_heads * a.channels);
  a.v = arrays.take(v, "v", key_rows * a.kv_heads * a.channels);
  a.sums = arrays.take(sums, "sums", rows * a.heads * 2, written);
  call.queries = offsets(cu_queries, "cu_queries", rows), call.keys = offsets(cu_keys, "cu_keys", key_rows);
  STD_TORCH_CHECK(call.queries.size() == call.keys.size(), "cu_queries and cu_keys are of ", call.queries.size() - 1,
                  " and ", call.keys.size() - 1, " sequences");
  if (tokens) {
    STD_TORCH_CHECK(tokens->scalar_type() == ScalarType::Long && tokens->numel() == rows && tokens->is_contiguous(),
                    "tokens must be ", rows, " contiguous int64 numbers");
    same_device(*tokens, q, "tokens");
    a.tokens = (const int64_t*)tokens->const_data_ptr();
  }
  a.draw = draw_of(nullptr, 0, 0, draw.key, draw.site, draw.threshold);
  int64_t longest = 1;
  call.cost.assign(1, 0);
  for (int64_t i = 0; i + 1 < (int64_t)call.queries.size(); i++) {
    const int64_t n = call.length(call.queries, i), m = call.length(call.keys, i);
    longest = std::max(longest, std::max(n, m));
    STD_TORCH_CHECK((!h.causal && !h.window) || n == m, "sequence ", i, " has ", n, " queries and ", m,
                    " keys: causal attention, and that of a window, is of a sequence to itself");
    // Rows are moved and processed in blocks of 32 or 16 queries.
    const int64_t near = h.window > 0 && h.window < m / 2 ? std::min(m, (2 - h.causal) * h.window + 32) : m;
    const int64_t cost = ((n + 15) / 16 * 16 + 16) * (near + 16) * (a.heads / a.kv_heads);
    for (int64_t g = 0; g < a.kv_heads; g++) call.cost.push_back(call.cost.back() + cost);
  }
  if (a.window >= longest) a.window = 0;  // it may be as large as int64 allows
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 2 && bias->size(0) == a.heads && bias->size(1) >= 2 * longest - 1,
                    "bias must be (", a.heads, ", ", 2 * longest - 1, " or more)");
    a.bias_width = bias->size(1);
    a.bias = arrays.take(*bias, "bias", a.heads * a.bias_width);
  }
  if (segments.kinds) check_segments(call, arrays, segments);
  return call;
}

// Runs body(arguments, query, queries, key, keys, group, sequence, scratch) for each sequence and key head, with the
// first query and key and their numbers. Results do not depend on the thread.
template <class Body>
void each_unit(const AttentionCall& call, bool backward, const Body& body) {
  constexpr int64_t kLeast = 1 << 15;  // cost that is worth a thread
  torch::stable::parallel_for(0, call.cost.back(), kLeast, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    std::unique_ptr<float[]> scratch;
    Attention own = call.a;
    int64_t size = 0;
    int64_t unit = std::lower_bound(call.cost.begin(), call.cost.end(), begin) - call.cost.begin();
    for (; unit < call.units() && call.cost[(size_t)unit] < end; unit++) {
      const int64_t i = call.sequence(unit);
      const int64_t n = call.length(call.queries, i), m = call.length(call.keys, i);
      const int64_t needed =
          kernels().attention_scratch(n, m, call.a.channels, backward, call.a.cap > 0.0f, call.rounds);
      if (needed > size) scratch.reset(new float[(size_t)needed + 16]), size = needed;
      float* const aligned = (float*)(((uintptr_t)scratch.get() + 63) / 64 * 64);
      if (own.kinds) own.num_kinds = call.kinds[(size_t)i], own.rules = call.a.rules + call.rules[(size_t)i];
      body(own, call.queries[(size_t)i], n, call.keys[(size_t)i], m, unit % own.kv_heads, i, aligned);
    }
  });
}

// Writes zeros for the queries of a sequence without keys, in the heads of a key head.
inline void clear_heads(const Attention& a, float* to, int64_t query, int64_t queries, int64_t group) {
  const int64_t share = a.heads / a.kv_heads * a.channels;
  for (int64_t i = query; i < query + queries; i++)
    memset(to + (i * a.kv_heads + group) * share, 0, sizeof(float) * (size_t)share);
}

void attention(Tensor out, Tensor sums, Tensor q, Tensor k, Tensor v, Tensor cu_queries, Tensor cu_keys,
               std::optional<Tensor> bias, std::optional<Tensor> tokens, int64_t heads, int64_t kv_heads, double scale,
               bool causal, int64_t window, double cap, bool may_round, int64_t key, int64_t site,
               int64_t first_head, int64_t threshold, std::optional<Tensor> kinds, std::optional<Tensor> rules,
               std::optional<Tensor> counts, std::optional<Tensor> segment_bias) {
  Arrays arrays(q);
  AttentionCall call = check_attention(arrays, q, k, v, sums, true, cu_queries, cu_keys, bias, tokens,
                                       {heads, kv_heads, scale, causal, window, cap, may_round},
                                       {key, site, first_head, threshold}, {kinds, rules, counts, segment_bias});
  Attention& a = call.a;
  a.out = arrays.take(out, "out", q.numel(), true);
  arrays.check();
  const AttentionKernel attend = call.rounds ? rounded()->attention : kernels().attention;
  each_unit(call, false, [&](const Attention& own, int64_t query, int64_t n, int64_t key, int64_t m, int64_t group,
                             int64_t, float* scratch) {
    if (m) return attend(own, query, n, key, m, group, scratch);
    clear_heads(a, a.out, query, n, group);
  });
}

void attention_backward(Tensor dq, Tensor dk, Tensor dv, std::optional<Tensor> dbias, Tensor grad, Tensor out,
                        Tensor sums, Tensor q, Tensor k, Tensor v, Tensor cu_queries, Tensor cu_keys,
                        std::optional<Tensor> bias, std::optional<Tensor> tokens, int64_t heads, int64_t kv_heads,
                        double scale, bool causal, int64_t window, double cap, bool may_round, int64_t key,
                        int64_t site, int64_t first_head, int64_t threshold, std::optional<Tensor> kinds,
                        std::optional<Tensor> rules, std::optional<Tensor> counts, std::optional<Tensor> segment_bias,
                        std::optional<Tensor> dsegment_bias) {
  Arrays arrays(q);
  AttentionCall call = check_attention(arrays, q, k, v, sums, false, cu_queries, cu_keys, bias, tokens,
                                       {heads, kv_heads, scale, causal, window, cap, may_round},
                                       {key, site, first_head, threshold}, {kinds, rules, counts, segment_bias});
  Attention& a = call.a;
  a.out = arrays.take(out, "out", q.numel());
  a.grad = arrays.take(grad, "grad", q.numel());
  a.dq = arrays.take(dq, "dq", q.numel(), true);
  a.dk = arrays.take(dk, "dk", k.numel(), true);
  a.dv = arrays.take(dv, "dv", v.numel(), true);
  STD_TORCH_CHECK(!dbias || bias, "there is no bias, so dbias must be left out");
  STD_TORCH_CHECK(!dsegment_bias || segment_bias, "there is no segment_bias, so dsegment_bias must be left out");
  const int64_t of_sequence = a.heads * a.segment_width;
  float* slopes = dbias ? arrays.take(*dbias, "dbias", a.heads * a.bias_width, true) : nullptr;
  float* by_segments = dsegment_bias ? arrays.take(*dsegment_bias, "dsegment_bias", of_sequence, true) : nullptr;
  arrays.check();
  const AttentionBackwardKernel attend_backward =
      call.rounds ? rounded()->attention_backward : kernels().attention_backward;
  // Each sequence's addends of dbias and dsegment_bias, summed in order below, independent of the threads.
  const int64_t sequences = (int64_t)call.queries.size() - 1;
  std::vector<int64_t> first(1, 0);
  for (int64_t i = 0; slopes && i < sequences; i++)
    first.push_back(first.back() +
                    a.heads * std::max((int64_t)0, call.length(call.queries, i) + call.length(call.keys, i) - 1));
  std::vector<float> parts((size_t)first.back(), 0.0f);
  std::vector<float> segment_parts(by_segments ? (size_t)(sequences * of_sequence) : 0, 0.0f);
  each_unit(call, true, [&](const Attention& own, int64_t query, int64_t n, int64_t key, int64_t m, int64_t group,
                            int64_t i, float* scratch) {
    float* const to = slopes ? parts.data() + first[(size_t)i] : nullptr;
    float* const to_segments = by_segments ? segment_parts.data() + i * of_sequence : nullptr;
    if (m) return attend_backward(own, query, n, key, m, group, to, to_segments, scratch);
    clear_heads(a, a.dq, query, n, group);
  });
  if (by_segments) memset(by_segments, 0, sizeof(float) * (size_t)of_sequence);
  for (int64_t i = 0; by_segments && i < sequences; i++)
    for (int64_t k = 0; k < of_sequence; k++) by_segments[k] += segment_parts[(size_t)(i * of_sequence + k)];
  if (!slopes) return;
  memset(slopes, 0, sizeof(float) * (size_t)(a.heads * a.bias_width));
  for (int64_t i = 0; i < sequences; i++) {
    const int64_t n = call.length(call.queries, i), m = call.length(call.keys, i);
    for (int64_t h = 0; m && n && h < a.heads; h++) {
      const float* from = parts.data() + first[(size_t)i] + h * (n + m - 1);
      float* middle = slopes + h * a.bias_width + a.bias_width / 2;
      for (int64_t d = 0; d < n + m - 1; d++) middle[m - 1 - d] += from[d];
    }
  }
}

}  // namespace
}  // namespace modelcenter
