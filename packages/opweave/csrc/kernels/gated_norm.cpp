// Gated RMS norm, compiled once per instruction set. Computes in float32, and rounds once at the
// end.
#include "kernels/gated_norm.h"

#include "kernels/prefetch.h"
#include "kernels/rms.h"
#include "kernels/row_cursor.h"
#include "kernels/rows.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_math.h"

namespace {

constexpr int64_t kBuffered = 4096;  // floats on the stack, half of a small L1 cache

// One group of a row.
template <class T, class W>
struct Segment {
  T* out;
  const T* x;
  const T* gate;
  const W* weight;
  int64_t size;
  Next<T, T, T> next;  // of x, gate and out

  template <class Part>
  Vec weighted(Vec v, int64_t i, Part part) const {
    return weight != nullptr ? mul(v, Lanes<W>::load(weight + i, part)) : v;
  }
};

template <bool kSigmoid, class T>
inline Vec activate(Vec gate) {
  return kSigmoid ? MathFor<T>::sigmoid(gate) : Silu<T>{}(gate);
}

template <class T, class W>
inline float scale_of(const Segment<T, W>& group, float epsilon) {
  return inverse_rms(sum_of_squares(group.x, group.size), group.size, epsilon);
}

template <class T, class W>
inline void plain(const Segment<T, W> group, float epsilon) {
  const Vec scale = splat(scale_of(group, epsilon));
  const auto value = [=](int64_t i, auto part) {
    return group.weighted(mul(Lanes<T>::load(group.x + i, part), scale), i, part);
  };
  store_row<W, 1>(group.out, group.size, fetching(value, group.next));
}

template <bool kSigmoid, class T, class W>
inline void norm_then_gate(const Segment<T, W> group, float epsilon) {
  const Vec scale = splat(scale_of(group, epsilon));
  const auto value = [=](int64_t i, auto part) {
    const Vec normalized = mul(Lanes<T>::load(group.x + i, part), scale);
    const Vec gate = activate<kSigmoid, T>(Lanes<T>::load(group.gate + i, part));
    return mul(group.weighted(normalized, i, part), gate);
  };
  store_row<W, kAtOnce>(group.out, group.size, fetching(value, group.next));
}

// Normalize product(i, part); the first pass may buffer values for the second one.
template <class T, class W, class First, class Second>
inline void norm_of(const Segment<T, W> group, float epsilon, First first, Second second) {
  const float squares = sum_of_squares<float>(group.size, fetching(first, group.next));
  const Vec scale = splat(inverse_rms(squares, group.size, epsilon));
  for_each_vec(group.size, [=](int64_t i, auto part) {
    const Vec normalized = mul(second(i, part), scale);
    Lanes<T>::store(group.out + i, group.weighted(normalized, i, part), part);
  });
}

template <bool kSigmoid, class T, class W>
inline void gate_then_norm(const Segment<T, W> group, float epsilon) {
  const auto product = [=](int64_t i, auto part) {
    return mul(Lanes<T>::load(group.x + i, part),
               activate<kSigmoid, T>(Lanes<T>::load(group.gate + i, part)));
  };
  if (group.size > kBuffered) return norm_of(group, epsilon, product, product);
  float buffer[kBuffered];
  float* memory = buffer;
  const auto remember = [=](int64_t i, auto part) {
    const Vec v = product(i, part);
    Lanes<float>::store(memory + i, v, part);
    return v;
  };
  const auto recall = [=](int64_t i, auto part) { return Lanes<float>::load(memory + i, part); };
  norm_of(group, epsilon, remember, recall);
}

template <class T, class W, class Norm>
inline void for_each_group(int64_t begin, int64_t end, const OpweaveGatedNorm& call, Norm norm) {
  Rows<T> rows(call.rows, call.out, call.x, begin);
  RowCursor gates(call.gate_rows, begin);
  RowCursor next_gates(call.gate_rows, begin + 1);
  const char* gate_base = static_cast<const char*>(call.gate != nullptr ? call.gate : call.x);
  for (int64_t r = begin; r < end; ++r, rows.advance(), gates.advance(), next_gates.advance()) {
    T* out = rows.out();
    const T* x = rows.x();
    const T* gate = reinterpret_cast<const T*>(gates.in(gate_base, 0));
    const T* next_gate = reinterpret_cast<const T*>(next_gates.in(gate_base, 0));
    const auto next = next_rows(rows.next_x(), next_gate, rows.next_out());
    const W* weight = static_cast<const W*>(call.weight);
    for (int64_t i = 0; i < call.width; i += call.group_size) {
      norm(Segment<T, W>{out + i, x + i, gate + i, weight != nullptr ? weight + i : nullptr,
                       call.group_size, next.from(i)},
           call.epsilon);
    }
  }
}

struct GatedNormRows {
  template <class T, class W>
  static void run(int64_t begin, int64_t end, const OpweaveGatedNorm& call) {
    const auto run_with = [&](auto norm) { for_each_group<T, W>(begin, end, call, norm); };
    if (call.gate == nullptr) {
      run_with([](auto group, float epsilon) { plain(group, epsilon); });
    } else if (call.norm_before_gate && call.is_sigmoid) {
      run_with([](auto group, float epsilon) { norm_then_gate<true>(group, epsilon); });
    } else if (call.norm_before_gate) {
      run_with([](auto group, float epsilon) { norm_then_gate<false>(group, epsilon); });
    } else if (call.is_sigmoid) {
      run_with([](auto group, float epsilon) { gate_then_norm<true>(group, epsilon); });
    } else {
      run_with([](auto group, float epsilon) { gate_then_norm<false>(group, epsilon); });
    }
  }
};

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveGatedNormKernels, gated_norm) = {
    run_for_weight_type<GatedNormRows, OpweaveGatedNorm>,
};
