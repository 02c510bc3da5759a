// One distinct function per op. Neither torch's boxed kernels nor METH_FASTCALL functions carry
// user data, so each op gets its own function with its index as a template parameter.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

namespace opweave {

constexpr std::size_t kMaxOps = 128;

// Slot<I>::call for I in [0, kMaxOps).
template <template <std::size_t> class Slot, std::size_t... I>
constexpr auto make_slots(std::index_sequence<I...>) {
  return std::array{&Slot<I>::call...};
}

template <template <std::size_t> class Slot>
constexpr auto make_slots() {
  return make_slots<Slot>(std::make_index_sequence<kMaxOps>{});
}

}  // namespace opweave
