// Shared by both bindings of activations: checks of the tensors, allocation of the results, and the kernels' job.
#pragma once
#include <tuple>

#include "activation.h"
#include "arguments.h"

namespace modelcenter {

// The tensors own the memory that the job refers to.
struct ActivationCall {
  Tensor x, up;
  ActivationJob job{};
};

inline ActivationCall lay_out_activation(const Tensor& x, const std::optional<Tensor>& up, int64_t kind) {
  MC_CHECK(x.dim() > 0, "x has no dimensions, expected at least 1");
  MC_CHECK(kind >= 0 && kind < kActivations, "kind is ", kind, ", expected 0 to ", kActivations - 1);
  ActivationCall call;
  call.x = in_a_row(x);
  const int64_t all = x.numel(), n = x.size(x.dim() - 1);
  call.job.type = type_of(x, "x"), call.job.kind = (int)kind;
  call.job.n = n, call.job.rows = n ? all / n : 0;
  call.job.x = call.x.const_data_ptr();
  if (!up) return call;
  call.up = in_a_row(*up);
  call.job.up = take_numbers(call.up, "up", all, call.job.type, x);
  return call;
}

// Convert the operators' arguments to those of the function that does the work on one kind of device. total: dx summed
// over its rows, (n,); empty if it is not wanted.
using ActivationFunction = void (*)(const ActivationJob&, const Tensor& x, int64_t stream);
using ActivationBackwardFunction = void (*)(const ActivationJob&, const Tensor& x, const Tensor& total, int64_t stream);

template <ActivationFunction kActivate>
Tensor activation_operator(Tensor x, std::optional<Tensor> up, int64_t kind, int64_t stream) {
  ActivationCall call = lay_out_activation(x, up, kind);
  const Tensor out = torch::stable::empty_like(call.x);
  call.job.out = out.mutable_data_ptr();
  kActivate(call.job, call.x, stream);
  return out;
}

template <ActivationBackwardFunction kBackward>
std::tuple<Tensor, Tensor, Tensor> activation_backward_operator(Tensor given, Tensor x, std::optional<Tensor> up,
                                                                int64_t kind, bool sums, int64_t stream) {
  ActivationCall call = lay_out_activation(x, up, kind);
  ActivationJob& job = call.job;
  const Tensor grad = in_a_row(given), dx = torch::stable::empty_like(call.x);
  job.grad = take_numbers(grad, "grad", x.numel(), job.type, x);
  job.dx = dx.mutable_data_ptr();
  const Tensor dup = up ? torch::stable::empty_like(call.up) : torch::stable::new_empty(x, {0});
  if (up) job.dup = dup.mutable_data_ptr();
  const Tensor total = torch::stable::new_empty(x, {sums ? job.n : 0});
  kBackward(job, call.x, total, stream);
  return {dx, dup, total};
}

}  // namespace modelcenter
