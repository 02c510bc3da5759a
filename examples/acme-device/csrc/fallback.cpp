#include "fallback.h"

#include <ATen/native/CPUFallback.h>

#include <map>
#include <mutex>

namespace acme {
namespace {

std::mutex mutex;
std::map<std::string, std::int64_t> counts;

// The host would not notice that two arguments are on different devices.
void check_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::optional<c10::Device> found;
  const auto check = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::DeviceType::PrivateUse1) return;
    if (!found) found = tensor.device();
    TORCH_CHECK(tensor.device() == *found, op.operator_name(), ": tensors are on ", *found, " and ",
                tensor.device(), ".");
  };
  const auto count = op.schema().arguments().size();
  for (const c10::IValue& value : torch::jit::last(stack, count)) {
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) check(tensor);
    }
  }
}

// Copies the arguments to the host, runs the operator there, and copies results back. A view cannot
// be made that way, and is refused rather than turned into a copy.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_one_device(op, *stack);
  {
    std::lock_guard lock(mutex);
    ++counts[c10::toString(op.operator_name())];
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

}  // namespace

c10::Dict<std::string, std::int64_t> fallbacks() {
  c10::Dict<std::string, std::int64_t> found;
  std::lock_guard lock(mutex);
  for (const auto& [name, count] : counts) found.insert(name, count);
  return found;
}

void reset_fallbacks() {
  std::lock_guard lock(mutex);
  counts.clear();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace acme
