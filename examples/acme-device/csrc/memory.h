// The device's memory. It lies on the host, but the device knows every block of it: which device it
// belongs to, where it ends, and whether anything wrote past that end. No torch in here: this part
// stands for a vendor's driver.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace acme {

// The number of devices: ACME_DEVICES, from 1 to 8; without it, 1.
int device_count();

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct MemoryUse {
  std::size_t used, limit;  // bytes
};

// Returns a block of `bytes` (at least 1) on `device`, aligned to a cache line. Throws OutOfMemory.
void* allocate(std::size_t bytes, int device);

// Takes a block back. Ends the process if something was written behind it: the culprit is near.
void release(void* block);

// The device whose memory `address` is in, or -1.
int device_of(const void* address);

// Whether all of `bytes` from `address` lie in one live block of `device`.
bool holds(const void* address, std::size_t bytes, int device);

MemoryUse memory_use(int device);

// Lets every device hand out `bytes` at most; what is out already stays.
void set_memory_limit(std::size_t bytes);

}  // namespace acme
