// The runtime that torch requires of a device: an allocator, a guard for the current device, and
// hooks. Each is registered when this library is loaded.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "device.h"
#include "memory.h"

namespace acme {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local int current = 0;

c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device where = device(current);
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    try {
      void* const block = acme::allocate(bytes, current);
      return {block, block, &release, where};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

// Every call has finished when it returns, so there is one stream and nothing to wait for.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device getDevice() const override { return device(current); }

  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }

  void setDevice(c10::Device to) const override { set_current_device(to.index()); }

  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }

  c10::Stream getStream(c10::Device of) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, of);
  }

  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, of);
  }

  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }

  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex to) const override { set_current_device(to); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    const int before = current;
    set_current_device(to);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return to < 0 ? current : exchangeDevice(to);
  }

  c10::Device getDeviceFromPtr(void* address) const override {
    const int found = device_of(address);
    TORCH_CHECK(found >= 0, "acme: ", address, " is not in the memory of any device.");
    return device(found);
  }

  // Random numbers are drawn on the host and copied, by the fallback: the host's generator is the
  // device's, and one seed gives the same numbers on both.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }

  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "acme has no generators of its own; use torch.Generator(), which "
                                "draws on the host.");
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::Device where = storage.device();
    const c10::Device before = Guard().exchangeDevice(where);
    c10::DataPtr data = allocator.allocate(bytes);
    Guard().uncheckedSetDevice(before);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

int current_device() { return current; }

int checked_device(int index) {
  const int found = index == -1 ? current : index;
  TORCH_CHECK(0 <= found && found < device_count(), "there is no acme:", found, "; the last is acme:",
              device_count() - 1, ".");
  return found;
}

void set_current_device(int index) { current = checked_device(index); }

}  // namespace acme
