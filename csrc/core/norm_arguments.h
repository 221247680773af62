// Shared by both bindings of norms: checks of the tensors, allocation of the results, and the kernels' job.
#pragma once
#include <tuple>

#include "arguments.h"
#include "norm.h"

namespace modelcenter {

// The number of rows of a contiguous x (..., n) for a weight (n,).
inline int64_t rows_of(const Tensor& x, const Tensor& weight) {
  const int64_t n = weight.numel();
  MC_CHECK(n > 0, "weight has no numbers");
  MC_CHECK(x.dim() > 0 && x.size(x.dim() - 1) == n, "the rows of x are not as long as the weight, ", n);
  return x.numel() / n;
}

// The draw of a branch's dropout, for all channels of its rows.
struct Drawn {
  const std::optional<Tensor>& tokens;
  int64_t key, site, threshold;

  Draw check(const Tensor& x, int64_t rows) const {
    if (tokens) check_tokens(*tokens, x, rows);
    return draw_of(tokens ? (const int64_t*)tokens->const_data_ptr() : nullptr, 0, 0, key, site, threshold);
  }
};

// The tensors own the memory that the job refers to.
struct NormCall {
  Tensor x, branch, weight, bias, sum, out, stats;
  NormJob job{};
};

inline NormCall lay_out_norm(const Tensor& x, const std::optional<Tensor>& branch, const Drawn& drawn,
                             const Tensor& weight, const std::optional<Tensor>& bias, double eps) {
  NormCall call;
  NormJob& job = call.job;
  call.x = in_a_row(x), call.weight = in_a_row(weight);
  job.type = type_of(call.x, "x"), job.n = weight.numel(), job.rows = rows_of(call.x, weight), job.eps = (float)eps;
  job.x = call.x.const_data_ptr();
  job.weight = take_numbers(call.weight, "weight", job.n, job.type, x);
  if (bias) {
    call.bias = in_a_row(*bias);
    job.bias = take_numbers(call.bias, "bias", job.n, job.type, x);
  }
  if (branch) {
    call.branch = in_a_row(*branch);
    job.branch = take_numbers(call.branch, "branch", job.rows * job.n, job.type, x);
    job.draw = drawn.check(call.x, job.rows);
    call.sum = torch::stable::empty_like(call.x);
    job.sum = call.sum.mutable_data_ptr();
  } else {
    call.sum = torch::stable::new_empty(call.x, {0});
  }
  call.out = torch::stable::empty_like(call.x);
  job.out = call.out.mutable_data_ptr();
  call.stats = torch::stable::new_empty(call.x, {(bias ? 2 : 1) * job.rows}, ScalarType::Float);
  job.stats = (float*)call.stats.mutable_data_ptr();
  return call;
}

struct NormBackwardCall {
  Tensor grad, extra, sum, weight, dx, dbranch, dweight, dbias;
  NormBackwardJob job{};
};

// sums: whether the gradients of weight and bias are wanted; otherwise they are empty.
inline NormBackwardCall lay_out_norm_backward(const Tensor& grad, const std::optional<Tensor>& extra,
                                              bool extra_of_sum, const Tensor& sum, const Tensor& weight,
                                              const Tensor& stats, bool centered, bool sums, const Drawn& drawn) {
  NormBackwardCall call;
  NormBackwardJob& job = call.job;
  call.sum = in_a_row(sum), call.weight = in_a_row(weight), call.grad = in_a_row(grad);
  job.type = type_of(call.sum, "x"), job.n = weight.numel(), job.rows = rows_of(call.sum, weight);
  job.centered = centered;
  const int64_t all = job.rows * job.n;
  job.sum = call.sum.const_data_ptr();
  job.weight = take_numbers(call.weight, "weight", job.n, job.type, sum);
  job.grad = take_numbers(call.grad, "grad", all, job.type, sum);
  job.stats = (const float*)take_numbers(stats, "stats", (centered ? 2 : 1) * job.rows, kFloat, sum);
  if (extra) {
    call.extra = in_a_row(*extra);
    job.extra = take_numbers(call.extra, "extra", all, job.type, sum);
    job.extra_of_sum = extra_of_sum;
  }
  call.dx = torch::stable::empty_like(call.sum);
  job.dx = call.dx.mutable_data_ptr();
  job.draw = drawn.check(call.sum, job.rows);
  if (job.draw.threshold) {
    call.dbranch = torch::stable::empty_like(call.sum);
    job.dbranch = call.dbranch.mutable_data_ptr();
  } else {
    call.dbranch = torch::stable::new_empty(call.sum, {0});
  }
  call.dweight = torch::stable::new_empty(call.weight, {sums ? job.n : 0});
  call.dbias = torch::stable::new_empty(call.weight, {sums && centered ? job.n : 0});
  if (sums) job.dweight = call.dweight.mutable_data_ptr();
  if (sums && centered) job.dbias = call.dbias.mutable_data_ptr();
  return call;
}

// Convert the operators' arguments to those of the function that does the work on one kind of device.
using NormFunction = void (*)(const NormJob&, const Tensor& x, int64_t stream);
using NormBackwardFunction = void (*)(const NormBackwardJob&, const Tensor& x, int64_t stream);

template <NormFunction kNorm>
std::tuple<Tensor, Tensor, Tensor> norm_operator(Tensor x, Tensor weight, std::optional<Tensor> bias, double eps,
                                                 std::optional<Tensor> branch, std::optional<Tensor> tokens,
                                                 int64_t key, int64_t site, int64_t threshold, int64_t stream) {
  const NormCall call = lay_out_norm(x, branch, {tokens, key, site, threshold}, weight, bias, eps);
  kNorm(call.job, call.x, stream);
  return {call.sum, call.out, call.stats};
}

template <NormBackwardFunction kNormBackward>
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward_operator(
    Tensor grad, std::optional<Tensor> extra, bool extra_of_sum, Tensor sum, Tensor weight, Tensor stats, bool centered,
    bool sums, std::optional<Tensor> tokens, int64_t key, int64_t site, int64_t threshold, int64_t stream) {
  const NormBackwardCall call = lay_out_norm_backward(grad, extra, extra_of_sum, sum, weight, stats, centered, sums,
                                                      {tokens, key, site, threshold});
  kNormBackward(call.job, call.sum, stream);
  return {call.dx, call.dbranch, call.dweight, call.dbias};
}

}  // namespace modelcenter
