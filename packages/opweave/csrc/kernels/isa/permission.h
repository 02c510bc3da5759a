// The permission that a level needs besides features of the CPU.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Request permission from Linux to use AMX tile data, which holds for all threads of the process.
[[maybe_unused]] bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // the XSAVE state component
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
#endif
