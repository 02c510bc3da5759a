# The levels: the instruction sets and CPU models that kernels are compiled for, best first.
#
# opweave_add_level(<level>
#   CPU <feature>...      required features, named as for __builtin_cpu_supports
#   [NEEDS <function>]    another requirement: a function of kernels/dispatch.cpp
#   [VENDOR <vendor>]     the vendor of the CPU model, named as for __builtin_cpu_is. CPUs of other
#                         vendors prefer the next level, and run this one if OPWEAVE_ISA names it
#   [TUNING <struct>]     the tuning of kernels/tuning.h; Generic if not given
#   [EXTENDS <level> FAMILIES <family>...]
#                         compile only these families, and use the other kernels of that level
#   FLAGS <flag>...)      compiler flags
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  opweave_add_level(base)
  return()
endif()

set(avx512 -march=x86-64-v4)
set(avx512bf16 ${avx512} -mavx512bf16 -mavx512vbmi -mavx512vnni)
set(avx512bf16_features x86-64-v4 avx512bf16 avx512vbmi avx512vnni)

# Tiles, and float16 arithmetic, which all CPUs with tiles have. Layer norms and gated norms use
# neither.
check_cxx_compiler_flag(-mavx512fp16 OPWEAVE_COMPILES_FLOAT16)  # GCC 12, Clang 14
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND OPWEAVE_COMPILES_FLOAT16)
  opweave_add_level(amx
    CPU ${avx512bf16_features} avx512fp16 amx-tile amx-bf16
    NEEDS may_use_tiles
    TUNING SapphireRapids
    EXTENDS avx512bf16
    FAMILIES norm rotary quant activation fused_quant paged_attention linear low_bit gguf
    FLAGS ${avx512bf16} -mavx512fp16 -mamx-tile -mamx-bf16)
endif()

# The instructions of avx512bf16, tuned for Zen 4 and Zen 5. The other families have no tuning.
opweave_add_level(zen4
  CPU ${avx512bf16_features}
  VENDOR amd
  TUNING Zen4
  EXTENDS avx512bf16
  FAMILIES norm rotary quant activation fused_quant
  FLAGS ${avx512bf16})
opweave_add_level(avx512bf16 CPU ${avx512bf16_features} FLAGS ${avx512bf16})
opweave_add_level(avx512 CPU x86-64-v4 FLAGS ${avx512})
opweave_add_level(avx2 CPU x86-64-v3 FLAGS -march=x86-64-v3)
opweave_add_level(base CPU x86-64-v2 FLAGS -march=x86-64-v2)
