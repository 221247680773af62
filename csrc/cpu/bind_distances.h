// Attention whose scores depend on the distances of tokens: checks of the arguments, and the distribution of heads and
// sequences to threads.
#pragma once
#include "bind_attention.h"

namespace modelcenter {
namespace {

// The arguments of a call, and its parts: sequences of a head that one thread processes one after the other, with the
// same tables in its memory. Parts, and so the order of sums, depend only on the sequences and heads.
struct DistancesCall : AttentionCall {
  static constexpr int64_t kParts = 48;  // the least number of parts of all heads, if there are so many sequences
  std::vector<int64_t> part, reach;      // the first sequence of each part, and the length of its longest
  std::vector<int64_t> part_cost;        // of the sequences of one head before each part

  explicit DistancesCall(AttentionCall&& call) : AttentionCall(std::move(call)) {
    const int64_t sequences = (int64_t)queries.size() - 1, cuts = (kParts + a.heads - 1) / a.heads;
    const auto before = [&](int64_t i) { return cost[(size_t)(i * a.kv_heads)] / a.kv_heads; };
    for (int64_t i = 0, p = 0; i < sequences; i++) {
      const int64_t n = length(queries, i);
      if (p < cuts && before(i) >= before(sequences) / cuts * p)
        part.push_back(i), reach.push_back(0), part_cost.push_back(before(i)), p++;
      reach.back() = std::max(reach.back(), n);
    }
    part.push_back(sequences), part_cost.push_back(before(sequences));
  }
  int64_t parts() const { return (int64_t)reach.size(); }
  int64_t rows(int64_t p) const { return std::max((int64_t)0, 2 * reach[(size_t)p] - 1); }
};

inline const float* check_table(Arrays& arrays, DistancesCall& call, const std::optional<Tensor>& table,
                                const char* name) {
  if (!table) return nullptr;
  Attention& a = call.a;
  int64_t longest = 1;
  for (int64_t n : call.reach) longest = std::max(longest, n);
  STD_TORCH_CHECK(table->dim() == 2 && table->size(0) >= 2 * longest - 1 && table->size(1) == a.heads * a.channels, name,
                  " must be (", 2 * longest - 1, " or more, ", a.heads * a.channels, ")");
  STD_TORCH_CHECK(!a.table_rows || a.table_rows == table->size(0), name, " is of ", table->size(0),
                  " distances, and of_keys of ", a.table_rows);
  a.table_rows = table->size(0);
  return arrays.take(*table, name, a.table_rows * a.heads * a.channels);
}

inline DistancesCall check_distances(Arrays& arrays, const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& sums, bool written, const Tensor& cu_seqlens,
                                     const std::optional<Tensor>& of_keys, const std::optional<Tensor>& of_queries,
                                     const std::optional<Tensor>& tokens, const AttentionHeads& h,
                                     const AttentionDraw& draw) {
  const std::optional<Tensor> none;
  DistancesCall call(check_attention(arrays, q, k, v, sums, written, cu_seqlens, cu_seqlens, none, tokens, h, draw,
                                     {none, none, none, none}));
  call.a.of_keys = check_table(arrays, call, of_keys, "of_keys");
  call.a.of_queries = check_table(arrays, call, of_queries, "of_queries");
  return call;
}

// For each head and part: runs body(arguments, first token, tokens, head, scratch) for each of its sequences, and then
// end_part(arguments, head, part). Results do not depend on the thread.
template <class Body, class End>
void each_part(const DistancesCall& call, bool backward, const Body& body, const End& end_part) {
  constexpr int64_t kLeast = 1 << 15;  // cost that is worth a thread
  const int64_t heads = call.a.heads, whole = call.part_cost.back();
  const auto before = [&](int64_t unit) {
    return unit / call.parts() * whole + call.part_cost[(size_t)(unit % call.parts())];
  };
  torch::stable::parallel_for(0, heads * whole, kLeast, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    std::unique_ptr<float[]> memory;
    int64_t size = 0, unit = 0;
    while (unit < heads * call.parts() && before(unit) < begin) unit++;
    for (; unit < heads * call.parts() && before(unit) < end; unit++) {
      const int64_t head = unit / call.parts(), p = unit % call.parts();
      Attention own = call.a;
      own.reach = call.reach[(size_t)p];
      if (!own.reach) continue;
      const int64_t scratch = kernels().attention_scratch(own.reach, own.reach, own.channels, backward, false, false);
      const int64_t needed = scratch + kernels().distances_scratch(own.reach, own.channels, backward);
      if (needed > size) memory.reset(new float[(size_t)needed + 16]), size = needed;
      float* const aligned = (float*)(((uintptr_t)memory.get() + 63) / 64 * 64);
      own.tables = aligned + scratch;  // both begin at cache lines
      kernels().distances_begin(own, head, backward);
      for (int64_t i = call.part[(size_t)p]; i < call.part[(size_t)p + 1]; i++)
        if (const int64_t n = call.length(call.queries, i)) body(own, call.queries[(size_t)i], n, head, aligned);
      end_part(own, head, p);
    }
  });
}

void attention_by_distances(Tensor out, Tensor sums, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens,
                            std::optional<Tensor> of_keys, std::optional<Tensor> of_queries,
                            std::optional<Tensor> tokens, int64_t heads, double scale, bool causal, int64_t window,
                            int64_t key, int64_t site, int64_t first_head, int64_t threshold) {
  Arrays arrays(q);
  DistancesCall call = check_distances(arrays, q, k, v, sums, true, cu_seqlens, of_keys, of_queries, tokens,
                                       {heads, heads, scale, causal, window}, {key, site, first_head, threshold});
  call.a.out = arrays.take(out, "out", q.numel(), true);
  arrays.check();
  each_part(
      call, false,
      [&](const Attention& own, int64_t query, int64_t n, int64_t head, float* scratch) {
        kernels().attention(own, query, n, query, n, head, scratch);
      },
      [](const Attention&, int64_t, int64_t) {});
}

void attention_by_distances_backward(Tensor dq, Tensor dk, Tensor dv, std::optional<Tensor> dkeys,
                                     std::optional<Tensor> dqueries, Tensor grad, Tensor out, Tensor sums, Tensor q,
                                     Tensor k, Tensor v, Tensor cu_seqlens, std::optional<Tensor> of_keys,
                                     std::optional<Tensor> of_queries, std::optional<Tensor> tokens, int64_t heads,
                                     double scale, bool causal, int64_t window, int64_t key, int64_t site,
                                     int64_t first_head, int64_t threshold) {
  Arrays arrays(q);
  DistancesCall call = check_distances(arrays, q, k, v, sums, false, cu_seqlens, of_keys, of_queries, tokens,
                                       {heads, heads, scale, causal, window}, {key, site, first_head, threshold});
  Attention& a = call.a;
  a.out = arrays.take(out, "out", q.numel());
  a.grad = arrays.take(grad, "grad", q.numel());
  a.dq = arrays.take(dq, "dq", q.numel(), true);
  a.dk = arrays.take(dk, "dk", k.numel(), true);
  a.dv = arrays.take(dv, "dv", v.numel(), true);
  const int64_t numbers = a.table_rows * a.heads * a.channels;
  STD_TORCH_CHECK(!dkeys || of_keys, "there is no of_keys, so dkeys must be left out");
  STD_TORCH_CHECK(!dqueries || of_queries, "there is no of_queries, so dqueries must be left out");
  float* to[2] = {dkeys ? arrays.take(*dkeys, "dkeys", numbers, true) : nullptr,
                  dqueries ? arrays.take(*dqueries, "dqueries", numbers, true) : nullptr};
  arrays.check();
  // Each part's addends of the gradients of the tables, summed in order below, independent of the threads.
  std::vector<int64_t> first(1, 0);
  for (int64_t p = 0; p < call.parts(); p++) first.push_back(first.back() + a.heads * call.rows(p) * a.channels);
  std::unique_ptr<float[]> parts[2];
  for (int which = 0; which < 2; which++)
    if (to[which]) parts[which].reset(new float[(size_t)first.back()]);
  const auto of = [&](int which, int64_t head, int64_t p) {
    return to[which] ? parts[which].get() + first[(size_t)p] + head * call.rows(p) * a.channels : nullptr;
  };
  each_part(
      call, true,
      [&](const Attention& own, int64_t query, int64_t n, int64_t head, float* scratch) {
        kernels().attention_backward(own, query, n, query, n, head, nullptr, nullptr, scratch);
      },
      [&](const Attention& own, int64_t head, int64_t p) {
        kernels().distances_end(own, of(0, head, p), of(1, head, p));
      });
  torch::stable::parallel_for(0, 2 * a.table_rows, 16, [&](int64_t begin, int64_t end) {
    FlushDenormals flush;
    for (int64_t r = begin; r < end; r++) {
      const int which = r >= a.table_rows;
      if (!to[which]) continue;
      const int64_t row = r % a.table_rows, distance = row - a.table_rows / 2;
      float* const sum = to[which] + row * a.heads * a.channels;
      memset(sum, 0, sizeof(float) * (size_t)(a.heads * a.channels));
      for (int64_t p = 0; p < call.parts(); p++) {
        const int64_t near = distance + call.reach[(size_t)p] - 1;
        if (near < 0 || near >= call.rows(p)) continue;
        for (int64_t h = 0; h < a.heads; h++) {
          const float* from = of(which, h, p) + near * a.channels;
          for (int64_t c = 0; c < a.channels; c++) sum[h * a.channels + c] += from[c];
        }
      }
    }
  });
}

}  // namespace
}  // namespace modelcenter
