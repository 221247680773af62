// The CUDA side of the operators, whose schemas the CPU library declares. Compiled by the C++ compiler, for any torch:
// the stream is passed in by Python, as the stable ABI of torch 2.11 and 2.12 cannot provide it.
//
// No exception leaves this library, because with torch 2.11 for CUDA 13 exceptions ended the process. An operator that
// fails returns, and Python asks for the reason (engine.ops.library).
#include <torch/csrc/stable/accelerator.h>

#include <exception>
#include <string>
#include <tuple>
#include <type_traits>

#include "../core/activation_arguments.h"
#include "../core/norm_arguments.h"
#include "../core/rotary_arguments.h"
#include "activation.h"
#include "columns.h"
#include "dropout.h"
#include "kernels.h"
#include "loss.h"
#include "norm.h"
#include "rotary.h"

namespace modelcenter {
namespace {

using torch::stable::accelerator::DeviceGuard;

// Only kernel launches and queries of the GPU are inside a DeviceGuard, needed as the current GPU may not be that of
// the tensors; checks of the arguments, which may throw, come before it.
template <class Ask>
int64_t of_device(const Tensor& x, const Ask& ask) {
  const DeviceGuard guard(x.get_device_index());
  return ask();
}

void done(int error) { MC_CHECK(error == 0, "a CUDA kernel was not launched: error ", error); }

void step(int rule, const Tensors& p, const Tensors& g, const Tensors& m, const Tensors& v, const Tensors& aux,
          const Tensors& steps, const std::optional<Tensor>& gscale, const std::optional<Tensor>& found_inf,
          const Settings& settings, int64_t mode, const std::vector<int64_t>& places, const Scales& scales,
          int64_t stream) {
  if (p.empty()) return;
  const Call call = lay_out(p, g, m, v, aux, steps, rule, mode, places, scales);
  const float *const scale = scalar(gscale, p[0], "gscale"), *const skip = scalar(found_inf, p[0], "found_inf");
  const DeviceGuard guard(p[0].get_device_index());
  done(cuda_step(rule, call.slabs.data(), (int64_t)p.size(), call.types, settings, scale, skip, (void*)stream));
}

void grad_norm_sq(Tensors g, Tensor out, int64_t stream) {
  MC_CHECK(out.numel() == 1 && out.scalar_type() == ScalarType::Double, "out must be one fp64 number");
  std::vector<Slab> slabs(g.size());
  std::vector<int> types(g.size());
  std::vector<int64_t> sizes(g.size());
  for (size_t i = 0; i < g.size(); i++) {
    MC_CHECK(g[i].is_contiguous(), "g[", (int64_t)i, "] is not contiguous");
    same_device(g[i], out, "g");
    types[i] = type_of(g[i], "g");
    slabs[i].g = g[i].const_data_ptr();
    slabs[i].n = sizes[i] = g[i].numel();
  }
  const int64_t chunks = cuda_chunks(sizes.data(), (int64_t)g.size());
  const Tensor partial = torch::stable::new_empty(out, {chunks});
  const DeviceGuard guard(out.get_device_index());
  done(cuda_squares(slabs.data(), types.data(), (int64_t)g.size(), (double*)partial.mutable_data_ptr(),
                    (double*)out.mutable_data_ptr(), (void*)stream));
}

void clip_coef(Tensor norm_sq, std::optional<Tensor> loss_scale, double max_norm, double eps, Tensor norm,
               Tensor gscale, Tensor found_inf, int64_t stream) {
  MC_CHECK(norm_sq.numel() == 1 && norm_sq.scalar_type() == ScalarType::Double,
                  "norm_sq must be one fp64 number");
  const float* const scale = scalar(loss_scale, norm_sq, "loss_scale");
  float *const root = scalar(norm, norm_sq, "norm", true), *const factor = scalar(gscale, norm_sq, "gscale", true);
  float* const found = scalar(found_inf, norm_sq, "found_inf", true);
  const DeviceGuard guard(norm_sq.get_device_index());
  done(cuda_coefficients((const double*)norm_sq.const_data_ptr(), scale, max_norm, eps, root, factor, found,
                         (void*)stream));
}

void cast_scale_copy(Tensors out, Tensors in, std::optional<Tensor> scale, int64_t stream) {
  if (out.empty() && in.empty()) return;
  check_cast(out, in);
  std::vector<Slab> slabs(out.size());
  std::vector<int> to(out.size()), from(out.size());
  for (size_t i = 0; i < out.size(); i++) {
    to[i] = type_of(out[i], "out");
    from[i] = type_of(in[i], "input");
    slabs[i].p = out[i].mutable_data_ptr();
    slabs[i].g = in[i].const_data_ptr();
    slabs[i].n = out[i].numel();
  }
  const float* const factor = scalar(scale, out[0], "scale");
  const DeviceGuard guard(out[0].get_device_index());
  done(cuda_cast(slabs.data(), to.data(), from.data(), (int64_t)out.size(), factor, (void*)stream));
}

std::vector<Slab> parts(const Tensors& master, const Tensors& p, const Tensors& low) {
  check_split(master, p, low);
  std::vector<Slab> slabs(p.size());
  for (size_t i = 0; i < p.size(); i++) {
    slabs[i].aux = master[i].data_ptr();
    slabs[i].p = p[i].data_ptr();
    slabs[i].m = low[i].data_ptr();
    slabs[i].n = p[i].numel();
  }
  return slabs;
}

void split_master(Tensors master, Tensors p, Tensors low, int64_t stream) {
  if (p.empty() && master.empty()) return;
  const std::vector<Slab> slabs = parts(master, p, low);
  const DeviceGuard guard(p[0].get_device_index());
  done(cuda_split(slabs.data(), (int64_t)slabs.size(), (void*)stream));
}

void merge_master(Tensors p, Tensors low, Tensors master, int64_t stream) {
  if (p.empty() && master.empty()) return;
  const std::vector<Slab> slabs = parts(master, p, low);
  const DeviceGuard guard(p[0].get_device_index());
  done(cuda_merge(slabs.data(), (int64_t)slabs.size(), (void*)stream));
}

void dropout(Tensor out, Tensor x, std::optional<Tensor> residual, std::optional<Tensor> tokens, int64_t first_token,
             int64_t first_channel, int64_t key, int64_t site, int64_t threshold, int64_t stream) {
  const Draw draw = check_dropout(out, x, residual, tokens, first_token, first_channel, key, site, threshold);
  if (!x.numel()) return;
  const DeviceGuard guard(x.get_device_index());
  done(cuda_dropout(draw, x.const_data_ptr(), residual ? residual->const_data_ptr() : nullptr, out.mutable_data_ptr(),
                    type_of(x, "x"), x.size(0), x.size(1), (void*)stream));
}

void cross_entropy(Tensor logits, Tensor loss, Tensor targets, std::optional<Tensor> count, double scale,
                   double smoothing, bool train, int64_t stream) {
  const LossCall call = check_loss(logits, loss, targets, count);
  if (!call.rows) return;
  const DeviceGuard guard(logits.get_device_index());
  done(cuda_cross_entropy(call.logits, call.type, call.stride, call.targets, call.loss, call.rows, call.classes,
                          call.count, (float)scale, (float)smoothing, train, (void*)stream));
}

void in_registers(int64_t n) { MC_CHECK(n <= kLongestRow, "weight has ", n, " numbers, expected 1 to ", kLongestRow); }

void norm(const NormJob& job, const Tensor& x, int64_t stream) {
  in_registers(job.n);
  const DeviceGuard guard(x.get_device_index());
  done(cuda_norm(job, (void*)stream));
}

// Room for `numbers()` fp32 sums; `numbers` is called on the device of x.
template <class Numbers>
Tensor room_for(const Tensor& x, const Numbers& numbers) {
  return torch::stable::new_empty(x, {of_device(x, numbers)}, ScalarType::Float);
}

void norm_backward(const NormBackwardJob& job, const Tensor& x, int64_t stream) {
  in_registers(job.n);
  Tensor room;
  if (job.dweight) room = room_for(x, [&] { return cuda_norm_room(job); });
  const DeviceGuard guard(x.get_device_index());
  done(cuda_norm_backward(job, job.dweight ? (float*)room.mutable_data_ptr() : nullptr, (void*)stream));
}

Tensor column_sums(Tensor given, int64_t stream) {
  const Tensor x = with_rows(given, "x");
  const Columns of{x.const_data_ptr(), type_of(x, "x"), x.size(0), x.size(1), x.stride(0)};
  const Tensor out = torch::stable::new_empty(x, {of.n});
  if (!of.n) return out;
  const Tensor room = room_for(x, [&] { return cuda_column_sums_room(of); });
  const DeviceGuard guard(x.get_device_index());
  done(cuda_column_sums(of, out.mutable_data_ptr(), (float*)room.mutable_data_ptr(), (void*)stream));
  return out;
}

void rotate(const Rotation& job, const Tensor& q, int64_t stream) {
  const DeviceGuard guard(q.get_device_index());
  done(cuda_rotate(job, (void*)stream));
}

void activation(const ActivationJob& job, const Tensor& x, int64_t stream) {
  const DeviceGuard guard(x.get_device_index());
  done(cuda_activation(job, (void*)stream));
}

void activation_backward(const ActivationJob& job, const Tensor& x, const Tensor& total, int64_t stream) {
  const bool adds = total.numel() > 0;
  Tensor room;
  if (adds) room = room_for(x, [&] { return cuda_activation_room(job); });
  const DeviceGuard guard(x.get_device_index());
  done(cuda_activation_backward(job, adds ? total.mutable_data_ptr() : nullptr,
                                adds ? (float*)room.mutable_data_ptr() : nullptr, (void*)stream));
}

thread_local std::string failure;  // of this thread's last call, until it is reported; empty: success

// Results of this type for a call that failed: copies of the given tensor.
template <class Result>
struct Stand {
  static Result in(const Tensor& x) { return x; }
};
template <class... Results>
struct Stand<std::tuple<Results...>> {
  static std::tuple<Results...> in(const Tensor& x) { return {Stand<Results>::in(x)...}; }
};

template <class First, class... More>
const First& first_of(const First& first, const More&...) {
  return first;
}

// Wraps a function for torch: an exception becomes `failure`.
template <class Function, Function* kFunction>
struct Reporting;
template <class Result, class... Arguments, Result (*kFunction)(Arguments...)>
struct Reporting<Result(Arguments...), kFunction> {
  static Result call(Arguments... arguments) {
    failure.clear();
    try {
      if constexpr (std::is_void_v<Result>) return kFunction(std::move(arguments)...);
      else return kFunction(arguments...);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if constexpr (!std::is_void_v<Result>) return Stand<Result>::in(first_of(arguments...));
  }
};

}  // namespace
}  // namespace modelcenter

// Why this thread's last call failed; null if it did not, or if this was already reported: the next caller may have
// called a CPU operator, which does not reset it.
extern "C" __attribute__((visibility("default"))) const char* modelcenter_failure() {
  static thread_local std::string told;
  if (modelcenter::failure.empty()) return nullptr;
  told.swap(modelcenter::failure);
  modelcenter::failure.clear();
  return told.c_str();
}

#define REPORTING(function) TORCH_BOX((&modelcenter::Reporting<decltype(function), (function)>::call))

STABLE_TORCH_LIBRARY_IMPL(modelcenter, CUDA, m) {
  m.impl("adamw_", REPORTING(modelcenter::adamw<modelcenter::step>));
  m.impl("adamw8_", REPORTING(modelcenter::adamw8<modelcenter::step>));
  m.impl("lion_", REPORTING(modelcenter::lion<modelcenter::step>));
  m.impl("sgdm_", REPORTING(modelcenter::momentum<modelcenter::step>));
  m.impl("grad_norm_sq", REPORTING(modelcenter::grad_norm_sq));
  m.impl("clip_coef_", REPORTING(modelcenter::clip_coef));
  m.impl("cast_scale_copy_", REPORTING(modelcenter::cast_scale_copy));
  m.impl("split_master_", REPORTING(modelcenter::split_master));
  m.impl("dropout_", REPORTING(modelcenter::dropout));
  m.impl("cross_entropy_", REPORTING(modelcenter::cross_entropy));
  m.impl("merge_master_", REPORTING(modelcenter::merge_master));
  m.impl("norm", REPORTING(modelcenter::norm_operator<modelcenter::norm>));
  m.impl("norm_backward", REPORTING(modelcenter::norm_backward_operator<modelcenter::norm_backward>));
  m.impl("column_sums", REPORTING(modelcenter::column_sums));
  m.impl("rotate", REPORTING(modelcenter::rotate_operator<modelcenter::rotate>));
  m.impl("activation", REPORTING(modelcenter::activation_operator<modelcenter::activation>));
  m.impl("activation_backward",
         REPORTING(modelcenter::activation_backward_operator<modelcenter::activation_backward>));
}
