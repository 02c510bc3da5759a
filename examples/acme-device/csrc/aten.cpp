// The operators of torch that every tensor needs before any kernel runs: creation, views, resizing,
// and copies. All others go to the fallback.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device.h"
#include "host_view.h"
#include "memory.h"

namespace acme {

at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const auto options = tensor.options().device(c10::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

namespace {

const c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

c10::Device target(std::optional<c10::Device> asked) {
  const int index = checked_device(asked ? asked->index() : -1);
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "acme has strided tensors only.");
  TORCH_CHECK(!pinned.value_or(false), "only tensors on the host can be pinned.");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  check_options(layout, pinned);
  const c10::DeviceGuard guard(target(device));
  return at::detail::empty_generic(size, c10::GetAllocator(c10::DeviceType::PrivateUse1), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pinned) {
  check_options(layout, pinned);
  const c10::DeviceGuard guard(target(device));
  return at::detail::empty_strided_generic(size, stride,
                                           c10::GetAllocator(c10::DeviceType::PrivateUse1), kKeys,
                                           c10::dtype_or_default(dtype));
}

// Operators that allocate do so on the tensor's device, which may not be the current one.

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage_(at::Tensor& self, c10::Storage source, std::int64_t offset,
                         c10::IntArrayRef size, c10::IntArrayRef stride) {
  const c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_nothing_(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  auto* const allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator, /*resizable=*/true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  host_view(to).copy_(host_view(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return at::native::_local_scalar_dense_cpu(host_view(self));
}

at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
  host_view(self).fill_(value);
  return self;
}

at::Tensor& zero_(at::Tensor& self) {
  host_view(self).zero_();
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("fill_.Scalar", fill_);
  m.impl("zero_", zero_);
}

}  // namespace
}  // namespace acme
