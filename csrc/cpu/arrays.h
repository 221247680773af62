// Checks of plain fp32 arguments.
#pragma once
#include "../core/arguments.h"

namespace modelcenter {
namespace {

// The memory of the fp32 tensors of a call: contiguous, on one device, and written ones overlap no others.
class Arrays {
 public:
  explicit Arrays(const Tensor& first) : first_(first) {}
  float* take(const Tensor& t, const char* name, int64_t numel, bool written = false) {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.numel() == numel, name, " must be ", numel,
                    " fp32 numbers");
    STD_TORCH_CHECK(t.is_contiguous(), name, " is not contiguous");
    same_device(t, first_, name);
    float* data = (float*)data_of(t, written);
    overlaps_.add(data, 4 * numel, written);
    return data;
  }
  void check() { overlaps_.check(); }

 private:
  const Tensor& first_;
  Overlaps overlaps_;
};

}  // namespace
}  // namespace modelcenter
