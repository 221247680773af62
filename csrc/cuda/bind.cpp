// The CUDA side of the operators, whose schemas the CPU library declares. Compiled by the C++ compiler, with any torch:
// the stream comes from Python, as the stable ABI of torch 2.11 and 2.12 cannot give it.
#include <torch/csrc/stable/accelerator.h>

#include "../core/arguments.h"
#include "kernels.h"

namespace modelcenter {
namespace {

using torch::stable::accelerator::DeviceGuard;

void done(int error) { STD_TORCH_CHECK(error == 0, "a CUDA kernel was not launched: error ", error); }

void step(int rule, const Tensors& p, const Tensors& g, const Tensors& m, const Tensors& v, const Tensors& aux,
          const Tensors& steps, const std::optional<Tensor>& gscale, const std::optional<Tensor>& found_inf,
          const Settings& settings, int64_t mode, const std::vector<int64_t>& places, const Scales& scales,
          int64_t stream) {
  if (p.empty()) return;
  const DeviceGuard guard(p[0].get_device_index());
  const Call call = lay_out(p, g, m, v, aux, steps, rule, mode, places, scales);
  done(cuda_step(rule, call.slabs.data(), (int64_t)p.size(), call.types, settings, scalar(gscale, p[0], "gscale"),
                 scalar(found_inf, p[0], "found_inf"), (void*)stream));
}

void grad_norm_sq(Tensors g, Tensor out, int64_t stream) {
  STD_TORCH_CHECK(out.numel() == 1 && out.scalar_type() == ScalarType::Double, "out must be one fp64 number");
  const DeviceGuard guard(out.get_device_index());
  std::vector<Slab> slabs(g.size());
  std::vector<int> types(g.size());
  std::vector<int64_t> sizes(g.size());
  for (size_t i = 0; i < g.size(); i++) {
    STD_TORCH_CHECK(g[i].is_contiguous(), "g[", (int64_t)i, "] is not contiguous");
    same_device(g[i], out, "g");
    types[i] = type_of(g[i], "g");
    slabs[i].g = g[i].const_data_ptr();
    slabs[i].n = sizes[i] = g[i].numel();
  }
  const int64_t chunks = cuda_chunks(sizes.data(), (int64_t)g.size());
  const Tensor partial = torch::stable::new_empty(out, {chunks});
  done(cuda_squares(slabs.data(), types.data(), (int64_t)g.size(), (double*)partial.mutable_data_ptr(),
                    (double*)out.mutable_data_ptr(), (void*)stream));
}

void clip_coef(Tensor norm_sq, std::optional<Tensor> loss_scale, double max_norm, double eps, Tensor norm,
               Tensor gscale, Tensor found_inf, int64_t stream) {
  STD_TORCH_CHECK(norm_sq.numel() == 1 && norm_sq.scalar_type() == ScalarType::Double,
                  "norm_sq must be one fp64 number");
  const DeviceGuard guard(norm_sq.get_device_index());
  done(cuda_coefficients((const double*)norm_sq.const_data_ptr(), scalar(loss_scale, norm_sq, "loss_scale"), max_norm,
                         eps, scalar(norm, norm_sq, "norm", true), scalar(gscale, norm_sq, "gscale", true),
                         scalar(found_inf, norm_sq, "found_inf", true), (void*)stream));
}

void cast_scale_copy(Tensors out, Tensors in, std::optional<Tensor> scale, int64_t stream) {
  if (out.empty() && in.empty()) return;
  check_cast(out, in);
  const DeviceGuard guard(out[0].get_device_index());
  std::vector<Slab> slabs(out.size());
  std::vector<int> to(out.size()), from(out.size());
  for (size_t i = 0; i < out.size(); i++) {
    to[i] = type_of(out[i], "out");
    from[i] = type_of(in[i], "input");
    slabs[i].p = out[i].mutable_data_ptr();
    slabs[i].g = in[i].const_data_ptr();
    slabs[i].n = out[i].numel();
  }
  done(cuda_cast(slabs.data(), to.data(), from.data(), (int64_t)out.size(), scalar(scale, out[0], "scale"),
                 (void*)stream));
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

}  // namespace
}  // namespace modelcenter

STABLE_TORCH_LIBRARY_IMPL(modelcenter, CUDA, m) {
  m.impl("adamw_", TORCH_BOX(&modelcenter::adamw<modelcenter::step>));
  m.impl("adamw8_", TORCH_BOX(&modelcenter::adamw8<modelcenter::step>));
  m.impl("lion_", TORCH_BOX(&modelcenter::lion<modelcenter::step>));
  m.impl("sgdm_", TORCH_BOX(&modelcenter::momentum<modelcenter::step>));
  m.impl("grad_norm_sq", TORCH_BOX(&modelcenter::grad_norm_sq));
  m.impl("clip_coef_", TORCH_BOX(&modelcenter::clip_coef));
  m.impl("cast_scale_copy_", TORCH_BOX(&modelcenter::cast_scale_copy));
  m.impl("split_master_", TORCH_BOX(&modelcenter::split_master));
  m.impl("dropout_", TORCH_BOX(&modelcenter::dropout));
  m.impl("merge_master_", TORCH_BOX(&modelcenter::merge_master));
}
