// Quantization of rows to 8 bits, shared by the quantizing kernels.
//
// A row is a function value(i, part), which returns the vector of float32 values at element i, so
// that fused kernels can quantize computed values without storing them first.
#pragma once

#include "kernels/isa/fp8_quotients_avx512bf16.h"
#include "kernels/isa/fp8_steps_avx512.h"
#include "kernels/prefetch.h"
#include "kernels/storage.h"
#include "kernels/vec_group.h"
#include "kernels/vec_quant.h"

namespace {

struct Fp8 {
  using Storage = uint8_t;
  static constexpr float kMax = kFp8Max;
  static constexpr float kMinScale = 1.0f / (kFp8Max * 512.0f);
  template <class T>
  static constexpr bool kBySteps = kHasSteps<T>;

  template <bool kMayExceed>
  static auto codes(const Vec (&v)[kAtOnce]) {
    return fp8_of(v, v);
  }
};

struct Int8 {
  using Storage = int8_t;
  static constexpr float kMax = 127.0f;
  static constexpr float kMinScale = 0x1p-23f;  // float32's epsilon
  template <class T>
  static constexpr bool kBySteps = false;

  template <bool kMayExceed>
  static auto codes(const Vec (&v)[kAtOnce]) {
    return int8_of<kMayExceed>(v);
  }
};

// Return the scale for a largest magnitude; NaN for NaN.
template <class Q>
inline float scale_for(float largest) {
  const float scale = largest / Q::kMax;
  return scale < Q::kMinScale ? Q::kMinScale : scale;
}

inline float bounded(float largest, float upper_bound) {
  return largest > upper_bound || upper_bound != upper_bound ? upper_bound : largest;
}

// Store codes(kAtOnce vectors of values), one byte per value.
template <class Value, class Codes>
inline void store_codes(void* out, int64_t n, Value value, Codes codes) {
  char* to = static_cast<char*>(out);
  Vec values[kAtOnce];
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= n; i += kAtOnce * kLanes) {
    announce<kAtOnce * kLanes>(value, i);
    for (int k = 0; k < kAtOnce; ++k) values[k] = value(i + k * kLanes, Full{});
    store_bytes(to + i, codes(values), Full{});
  }
  if (i == n) return;
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t rest = n - i - k * kLanes;
    values[k] = rest >= kLanes ? value(i + k * kLanes, Full{})
                : rest > 0     ? value(i + k * kLanes, Tail{rest})
                               : splat(0);
  }
  store_bytes(to + i, codes(values), Tail{n - i});
}

// Values times a factor.
template <class Value>
struct Scaled {
  template <class Part>
  Vec operator()(int64_t i, Part part) const {
    return mul(value(i, part), factor);
  }

  Value value;
  Vec factor;
};

template <int64_t kElements, class Value>
__attribute__((always_inline)) inline void announce(const Scaled<Value>& scaled, int64_t i) {
  announce<kElements>(scaled.value, i);
}

// Quantize a row. Without kMayExceed, no quotient may be NaN or exceed the largest code.
template <class Q, bool kMayExceed = true, class Value>
inline void quantize(typename Q::Storage* out, int64_t n, float scale, Value value) {
  store_codes(out, n, Scaled<Value>{value, splat(1.0f / scale)}, Q::template codes<kMayExceed>);
}

// Return the largest magnitude of n values, or NaN if one is NaN.
template <class Value>
inline float largest_magnitude(int64_t n, Value value) {
  Vec most[kAtOnce] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= n; i += kAtOnce * kLanes) {
    Vec values[kAtOnce];
    announce<kAtOnce * kLanes>(value, i);
    for (int k = 0; k < kAtOnce; ++k) values[k] = value(i + k * kLanes, Full{});
    for (int k = 0; k < kAtOnce; ++k) most[k] = larger_magnitude(most[k], values[k]);
  }
  for (; i + kLanes <= n; i += kLanes) most[0] = larger_magnitude(most[0], value(i, Full{}));
  if (i < n) {
    const Tail rest{n - i};
    most[1] = larger_magnitude(most[1], keep(value(i, rest), rest));
  }
  return largest_or_nan(
      larger_magnitude(larger_magnitude(most[0], most[1]), larger_magnitude(most[2], most[3])));
}

// Return the largest magnitude of a row in memory. 16-bit magnitudes are compared as integers.
template <class T, class Ahead = Next<>>
inline float largest_of_row(const T* x, int64_t n, Ahead next = {}) {
  Words most{};
  int64_t i = 0;
  for (; i + kWords <= n; i += kWords) {
    next.template fetch_span<kWords>(i);
    most = larger_words(most, load_magnitudes(x + i, Full{}));
  }
  if (i < n) most = larger_words(most, load_magnitudes(x + i, Tail{n - i}));
  return float_of(T{largest_word(most)});
}

template <class Ahead = Next<>>
inline float largest_of_row(const float* x, int64_t n, Ahead next = {}) {
  return largest_magnitude(n, paced(Loaded<float>{x}, next));
}

// The elements of a computed row, rounded to T.
template <class T, class Value>
struct Stored {
  template <class Part>
  Vec operator()(int64_t i, Part part) const {
    return Lanes<T>::stored(value(i, part));
  }

  Value value;
};

template <class T, class Value>
inline Stored<T, Value> stored(Value value) {
  return {value};
}

// Computed rows of up to this many elements are buffered in the L1 cache instead of computed twice.
constexpr int64_t kKept = 8192;

template <class T, class Value>
inline void keep_row(T* kept, int64_t n, Value value) {
  store_row<float, kAtOnce>(kept, n, value);
}

// Buffer a computed row, and return its largest magnitude. For 16-bit numbers, a separate pass over
// the buffer is cheaper.
template <class T, class Value>
inline float keep_and_find_largest(T* kept, int64_t n, Value value) {
  keep_row(kept, n, value);
  return largest_of_row(kept, n);
}

template <class Value>
inline float keep_and_find_largest(float* kept, int64_t n, Value value) {
  Vec most = splat(0);
  map_vecs(n, value, [=, &most](int64_t i, Vec v, auto part) {
    Lanes<float>::store(kept + i, v, part);
    most = larger_magnitude(most, keep(v, part));
  });
  return largest_or_nan(most);
}

// For rows with fewer elements, computing the steps of their scale (isa/fp8_steps_avx512.h) does
// not pay.
constexpr int64_t kFewestForSteps = 512;

// Quantize a row in memory with a given scale.
template <class Q, bool kMayExceed, class T, class Ahead>
inline void quantize_row(typename Q::Storage* out, int64_t n, float scale, const T* row,
                         Ahead next) {
  int64_t done = 0;
  if constexpr (Q::template kBySteps<T>) {
    if (n >= kFewestForSteps && Fp8Steps<T>::holds(scale)) {
      done = Fp8Steps<T>(scale).template store_codes<kMayExceed>(out, n, row, next);
      if (done == n) return;
    }
  }
  quantize<Q, kMayExceed>(out + done, n - done, scale,
                          paced(Loaded<T>{row + done}, next.from(done)));
}

// Quantize a row in memory with the scale of its largest magnitude, and return the scale.
template <class Q, class T, class Ahead>
inline float quantize_row_of(typename Q::Storage* out, int64_t n, float largest, float upper_bound,
                             const T* row, Ahead next) {
  const float scale = scale_for<Q>(bounded(largest, upper_bound));
  if (largest <= upper_bound && largest < __builtin_inff()) {
    quantize_row<Q, false>(out, n, scale, row, next);
  } else {
    quantize_row<Q, true>(out, n, scale, row, next);
  }
  return scale;
}

// Quantize a computed row with a given scale. 16-bit rows are buffered first, because doing both at
// once needs too many registers.
template <class Q, class T, class Value, class Ahead>
inline void quantize_static(typename Q::Storage* out, int64_t n, float scale, Value value,
                            Ahead next) {
  if constexpr (sizeof(T) == sizeof(uint16_t)) {
    T kept[kKept];
    if (n <= kKept) {
      keep_row(kept, n, paced(value, next.first));
      return quantize_row<Q, true>(out, n, scale, kept, next.second);
    }
  }
  quantize<Q>(out, n, scale, paced(stored<T>(value), next));
}

// Quantize a computed row with the scale of its largest magnitude, and return the scale.
template <class Q, class T, class Value, class Ahead>
inline float quantize_dynamic(typename Q::Storage* out, int64_t n, float upper_bound, Value value,
                              Ahead next) {
  T kept[kKept];
  if (n <= kKept) {
    const float largest = keep_and_find_largest(kept, n, paced(value, next.first));
    return quantize_row_of<Q>(out, n, largest, upper_bound, kept, next.second);
  }
  const auto as_stored = stored<T>(value);
  const float largest = largest_magnitude(n, paced(as_stored, next.first));
  const float scale = scale_for<Q>(bounded(largest, upper_bound));
  quantize<Q>(out, n, scale, paced(as_stored, next.second));
  return scale;
}

// Round up to a power of two: a nonzero mantissa carries into the exponent.
inline float rounded_up_to_power_of_two(float scale) {
  if (scale != scale) return scale;
  uint32_t bits;
  memcpy(&bits, &scale, sizeof(bits));
  bits = (bits + 0x7fffff) & 0x7f800000;
  memcpy(&scale, &bits, sizeof(bits));
  return scale;
}

// Turn n largest magnitudes into scales, in-place.
inline void make_group_scales(float* scales, int64_t n, bool power_of_two) {
  const Vec least = splat(Fp8::kMinScale);
  for_each_vec(n, [=](int64_t i, auto part) {
    const Vec scale = div(Lanes<float>::load(scales + i, part), splat(Fp8::kMax));
    Lanes<float>::store(scales + i, max(least, scale), part);  // argument order preserves NaN
  });
  if (!power_of_two) return;
  for (int64_t i = 0; i < n; ++i) scales[i] = rounded_up_to_power_of_two(scales[i]);
}

// Quantize a group with exact division instead of a product with the reciprocal.
template <class Value>
inline void quantize_group(uint8_t* out, int64_t n, float scale, Value value) {
  const Vec divisor = splat(scale);
  if (scale < __builtin_inff()) {
    const Vec inverse = splat(1.0f / scale);
    store_codes(out, n, value, [=](const Vec(&v)[kAtOnce]) {
      Vec quotients[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k) quotients[k] = quotient(v[k], divisor, inverse);
      return fp8_of(quotients, v);
    });
  } else {  // infinite or NaN
    store_codes(
        out, n, [=](int64_t i, auto part) { return div(value(i, part), divisor); },
        Fp8::codes<true>);
  }
}

// The elements of a row from an offset on.
template <class Value>
struct From {
  template <class Part>
  auto operator()(int64_t i, Part part) const {
    return value(first + i, part);
  }

  Value value;
  int64_t first;
};

template <class Value>
constexpr bool kGivesHalves<From<Value>> = kGivesHalves<Value>;

template <int64_t kElements, class Value>
__attribute__((always_inline)) inline void announce(const From<Value>& part_of_row, int64_t i) {
  announce<kElements>(part_of_row.value, part_of_row.first + i);
}

// Quantize a group in memory.
template <class T, class Ahead>
inline void quantize_group(uint8_t* out, int64_t n, float scale, const T* row, Ahead next) {
  int64_t done = 0;
  if constexpr (kHasQuotients<T>) {
    if (scale < __builtin_inff()) done = Fp8Quotients<T>(scale).store_codes(out, n, row, next);
    if (done == n) return;
  }
  quantize_group(out + done, n - done, scale, paced(Loaded<T>{row + done}, next.from(done)));
}

// Quantize a row in memory by groups. All scales are computed first, so that their latencies
// overlap.
template <class T, class Ahead>
inline void quantize_stored_groups(uint8_t* out, float* scales, int64_t width, int64_t group_size,
                                   bool power_of_two, const T* row, Ahead next) {
  const auto size = [=](int64_t first) {
    return width - first < group_size ? width - first : group_size;
  };
  float* scale = scales;
  for (int64_t first = 0; first < width; first += group_size) {
    *scale++ = largest_of_row(row + first, size(first), next.first.from(first));
  }
  make_group_scales(scales, scale - scales, power_of_two);
  for (int64_t first = 0; first < width; first += group_size) {
    quantize_group(out + first, size(first), *scales++, row + first, next.second.from(first));
  }
}

// Quantize a computed row by groups.
template <class T, class Value, class Ahead>
inline void quantize_groups(uint8_t* out, float* scales, int64_t width, int64_t group_size,
                            bool power_of_two, Value value, Ahead next) {
  T kept[kKept];
  const int64_t step = group_size > kKept ? group_size : kKept / group_size * group_size;
  for (int64_t first = 0; first < width; first += step, scales += step / group_size) {
    const int64_t n = width - first < step ? width - first : step;
    const From<Value> part_of_row{value, first};
    const auto ahead = next.from(first);
    if (n <= kKept) {
      keep_row(kept, n, paced(part_of_row, ahead.first));
      quantize_stored_groups(out + first, scales, n, group_size, power_of_two, kept,
                             walks(next_rows(), ahead.second));
    } else {
      const auto as_stored = stored<T>(part_of_row);
      *scales = largest_magnitude(n, paced(as_stored, ahead));
      make_group_scales(scales, 1, power_of_two);
      quantize_group(out + first, n, *scales, as_stored);
    }
  }
}

// Call Rows::run<T, Q>(begin, end, call) for the call's storage type and output type.
template <class Rows, class Call>
void run_for_types(int64_t begin, int64_t end, void* erased) {
  const Call& call = *static_cast<const Call*>(erased);
  with_storage(call.dtype, [&](auto storage) {
    if (call.out_dtype == OPWEAVE_INT8) {
      Rows::template run<decltype(storage), Int8>(begin, end, call);
    } else {
      Rows::template run<decltype(storage), Fp8>(begin, end, call);
    }
  });
}

}  // namespace
