// Shared by both bindings of rotary positions: checks of the tensors, and allocation of the results.
#pragma once
#include <tuple>

#include "arguments.h"
#include "rotary.h"

namespace modelcenter {

inline void of_its_kind(const Tensor& t, const Tensor& q, const char* name) {
  same_device(t, q, name);
  MC_CHECK(t.scalar_type() == q.scalar_type(), name, " has another dtype than q");
}

// The heads of x, which must have the number of tokens and the type of q.
inline Heads heads_of(const Tensor& x, const char* name, const Tensor& out, int64_t head_dim, const Tensor& q) {
  of_its_kind(x, q, name);
  MC_CHECK(x.size(0) == q.size(0), name, " has ", x.size(0), " rows, q has ", q.size(0));
  MC_CHECK(head_dim > 0 && x.size(1) % head_dim == 0, name, " has rows of ", x.size(1), " numbers, expected heads of ",
           head_dim);
  MC_CHECK(x.size(1) < (int64_t)1 << 30, name, " has rows of 2^30 numbers or more");
  return {x.const_data_ptr(), out.mutable_data_ptr(), x.stride(0), x.size(1) / head_dim};
}

inline const void* angles_of(const Tensor& t, const char* name, int64_t half, const Tensor& q) {
  of_its_kind(t, q, name);
  MC_CHECK(t.numel() == q.size(0) * half, name, " has ", t.numel(), " numbers, expected ", q.size(0), " rows of ", half);
  return t.const_data_ptr();
}

using RotateFunction = void (*)(const Rotation& job, const Tensor& q, int64_t stream);

template <RotateFunction kRotate>
std::tuple<Tensor, Tensor> rotate_operator(Tensor given_q, Tensor given_k, Tensor given_cos, Tensor given_sin,
                                           int64_t head_dim, bool interleaved, bool back, int64_t stream) {
  const Tensor q = with_rows(given_q, "q"), k = with_rows(given_k, "k");
  const Tensor cos = in_a_row(given_cos), sin = in_a_row(given_sin);
  const Tensor new_q = torch::stable::new_empty(q, {q.size(0), q.size(1)});
  const Tensor new_k = torch::stable::new_empty(k, {k.size(0), k.size(1)});
  const int64_t half = cos.dim() ? cos.size(cos.dim() - 1) : 0;
  MC_CHECK(2 * half <= head_dim, "cos has angles of ", 2 * half, " channels, head_dim is ", head_dim);
  const Rotation job{heads_of(q, "q", new_q, head_dim, q), heads_of(k, "k", new_k, head_dim, q),
                     angles_of(cos, "cos", half, q), angles_of(sin, "sin", half, q),
                     type_of(q, "q"), q.size(0), head_dim, half, interleaved, back};
  kRotate(job, q, stream);
  return {new_q, new_k};
}

}  // namespace modelcenter
