// Checks of plain fp32 arguments.
#pragma once
#include "../core/arguments.h"

namespace modelcenter {
namespace {

// The memory of fp32 tensors that belong together: contiguous, on one device, none written where another lies.
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
  // A matrix that is written, whose rows are contiguous, but need not follow one another.
  float* take_rows(const Tensor& t, const char* name) {
    const int64_t rows = t.size(0), columns = t.size(1), stride = t.stride(0);
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, name, " must be fp32 numbers");
    contiguous_rows(t, name);
    same_device(t, first_, name);
    float* data = (float*)t.mutable_data_ptr();
    if (t.numel()) overlaps_.add(data, 4 * ((rows - 1) * stride + columns), true);
    return data;
  }
  void check() { overlaps_.check(); }

 private:
  const Tensor& first_;
  Overlaps overlaps_;
};

}  // namespace
}  // namespace modelcenter
