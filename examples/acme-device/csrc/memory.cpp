#include "memory.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace acme {
namespace {

constexpr int kMostDevices = 8;
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kGuard = 64;  // bytes behind each block that nobody may touch
constexpr unsigned char kGuardByte = 0xAC;

struct Block {
  std::size_t bytes;
  int device;
};

struct State {
  std::mutex mutex;
  std::map<std::uintptr_t, Block> blocks;  // by address
  std::array<std::size_t, kMostDevices> used{};
  std::size_t limit = std::size_t{4} << 30;
};

// Never destroyed: tensors may be freed after static destructors have run.
State& state() {
  static State* const instance = new State;
  return *instance;
}

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

// The block that `address` is in, or end(). The caller holds the mutex.
std::map<std::uintptr_t, Block>::iterator find(State& s, std::uintptr_t address) {
  auto after = s.blocks.upper_bound(address);
  if (after == s.blocks.begin()) return s.blocks.end();
  auto block = std::prev(after);
  return address < block->first + block->second.bytes ? block : s.blocks.end();
}

void check_guard(const void* block, std::size_t bytes) {
  const auto* guard = static_cast<const unsigned char*>(block) + bytes;
  for (std::size_t i = 0; i < kGuard; ++i) {
    if (guard[i] == kGuardByte) continue;
    std::fprintf(stderr, "acme: byte %zu behind a block of %zu bytes was overwritten.\n", i, bytes);
    std::abort();
  }
}

}  // namespace

int device_count() {
  static const int count = [] {
    const char* const wanted = std::getenv("ACME_DEVICES");
    return wanted == nullptr ? 1 : std::clamp(std::atoi(wanted), 1, kMostDevices);
  }();
  return count;
}

void* allocate(std::size_t bytes, int device) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  const std::size_t used = s.used.at(device);
  if (bytes > s.limit || used > s.limit - bytes) {
    throw OutOfMemory("acme:" + std::to_string(device) + " is out of memory: " +
                      std::to_string(bytes) + " bytes were asked for, " + std::to_string(used) +
                      " of " + std::to_string(s.limit) + " are in use.");
  }
  auto* block = static_cast<unsigned char*>(
      ::operator new(bytes + kGuard, std::align_val_t{kAlignment}, std::nothrow));
  if (block == nullptr) {
    throw OutOfMemory("acme:" + std::to_string(device) + ": the host has no " +
                      std::to_string(bytes) + " bytes left.");
  }
  std::memset(block + bytes, kGuardByte, kGuard);
  s.blocks.emplace(number(block), Block{bytes, device});
  s.used[device] += bytes;
  return block;
}

void release(void* block) {
  if (block == nullptr) return;
  State& s = state();
  std::lock_guard lock(s.mutex);
  const auto found = s.blocks.find(number(block));
  if (found == s.blocks.end()) {
    std::fprintf(stderr, "acme: %p is not a block of the device, or was freed before.\n", block);
    std::abort();
  }
  check_guard(block, found->second.bytes);
  s.used[found->second.device] -= found->second.bytes;
  s.blocks.erase(found);
  ::operator delete(block, std::align_val_t{kAlignment});
}

int device_of(const void* address) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  const auto block = find(s, number(address));
  return block == s.blocks.end() ? -1 : block->second.device;
}

bool holds(const void* address, std::size_t bytes, int device) {
  if (bytes == 0) return true;
  State& s = state();
  std::lock_guard lock(s.mutex);
  const auto block = find(s, number(address));
  return block != s.blocks.end() && block->second.device == device &&
         bytes <= block->first + block->second.bytes - number(address);
}

MemoryUse memory_use(int device) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return {s.used.at(device), s.limit};
}

void set_memory_limit(std::size_t bytes) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.limit = bytes;
}

}  // namespace acme
