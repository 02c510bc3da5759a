// Rotary position embedding, alone, after RMS normalization, or into a paged cache; compiled once
// per instruction set.
//
// Angles are rounded to x's type, as in the op's definition. Results are computed in float32:
// products of 16-bit numbers are exact, and the sum of two is rounded to float32 and then to x's
// type. The results are bitwise equal on all instruction sets without float16 arithmetic. With
// float16 arithmetic, each step is rounded, as in the op's definition.
#include "kernels/rotary.h"

#include "kernels/cache_rows.h"
#include "kernels/prefetch.h"
#include "kernels/rms.h"
#include "kernels/row_cursor.h"
#include "kernels/rows.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_group.h"
#include "kernels/vec_pairs.h"

namespace {

// Rotated vectors of the two halves of a neox head.
struct Rotated {
  Vec first;
  Vec second;
};

// Call visit with the angles of one token: the cosines, then the sines.
template <class T, class Visit>
inline void with_angles(const OpweaveRotary& call, int64_t token, Visit visit) {
  int64_t position = call.positions_dtype == OPWEAVE_INT64
                         ? static_cast<const int64_t*>(call.positions)[token]
                         : static_cast<const int32_t*>(call.positions)[token];
  if (position < 0) position += call.cache_rows;
  const int64_t row = position * call.cache_stride;
  if (call.cache_dtype == OPWEAVE_FLOAT32) {
    visit(Loaded<float>{static_cast<const float*>(call.cache) + row});
  } else {
    visit(Loaded<T>{static_cast<const T*>(call.cache) + row});
  }
}

// Copy the elements after the rotated ones.
template <class T>
inline void copy_rest(const OpweaveRotary& call, T* out, const T* x) {
  if (out == x) return;
  const int64_t rest = call.head_size - call.rotary_size;
  memcpy(out + call.rotary_size, x + call.rotary_size, static_cast<size_t>(rest) * sizeof(T));
}

// Cosines and sines of one token, rounded to T, in the layout of the vectors of a head. The buffers
// are padded by one vector, so that whole vectors can be read.
template <class T>
class Angles {
 public:
  explicit Angles(const OpweaveRotary& call)
      : call_(call),
        half_(call.rotary_size / 2),
        grouped_(call.is_neox ? half_ / kGroup<T> * kGroup<T> : 0) {}

  void load(int64_t token) {
    with_angles<T>(call_, token, [this](auto row) { load_row(row); });
    if (!call_.is_neox && !kHoldsPairs<T>) interleave();
  }

  // Rotate the halves of a neox head, whose elements are value(i, part). value may read the
  // elements of out at the same positions.
  template <class Value>
  void write_halves(T* out, Value value) const {
    int64_t i = 0;
    if constexpr (kInTurn > 1) {
      for (; i + kInTurn * kGroup<T> <= grouped_; i += kInTurn * kGroup<T>) {
        write_groups<kInTurn>(out, i, value);
      }
    }
    for (; i < grouped_; i += kGroup<T>) write_groups<1>(out, i, value);
    if (grouped_ < half_) write_rest(out, value);
  }

  // Rotate a head; out may be x. `next` is prefetched.
  template <class Ahead>
  void rotate(T* out, const T* x, Ahead next) const {
    if (call_.is_neox) {
      write_halves(out, fetching(Loaded<T>{x}, next));
    } else if constexpr (kHoldsPairs<T>) {
      write_groups_of_pairs(out, x, next);
    } else {
      write_pairs(out, fetching(Loaded<T>{x}, next));
    }
    copy_rest(call_, out, x);
  }

 private:
  static constexpr int64_t kCapacity = OPWEAVE_MAX_ROTARY_SIZE + kLanes;
  // Groups of one half that are processed before those of the other half, so that float32 cache
  // lines are accessed sequentially. AVX2 does not have enough registers.
  static constexpr int kInTurn = kLanes == 16 && sizeof(T) == sizeof(float) ? 4 : 1;

  // Process the rest of halves that are not a multiple of groups. Not inlined, because usual heads
  // do not have a rest, and would be 1.1 times slower.
  template <class Value>
  __attribute__((noinline)) void write_rest(T* out, Value value) const {
    for_each_vec(half_ - grouped_, [=](int64_t past, auto part) {
      const int64_t i = grouped_ + past;
      const Rotated both = rotated(value(i, part), value(half_ + i, part), i);
      Lanes<T>::store(out + i, both.first, part);
      Lanes<T>::store(out + half_ + i, both.second, part);
    });
  }

  // Load angles in the order of groups, padded with zeros to a whole vector.
  template <class Row>
  void load_row(Row row) {
    for (int64_t i = 0; i < grouped_; i += kGroup<T>) {
      store_group(cos_ + i, i, row);
      store_group(sin_ + i, half_ + i, row);
    }
    for_each_vec(half_ - grouped_, [&](int64_t past, auto part) {
      const int64_t i = grouped_ + past;
      Lanes<float>::store(cos_ + i, rounded(row(i, part), row), Full{});
      Lanes<float>::store(sin_ + i, rounded(row(half_ + i, part), row), Full{});
    });
  }

  template <class Row>
  static void store_group(float* to, int64_t i, Row row) {
    const Group<T> group = group_of<T>(i, row);
    for (int k = 0; k < Group<T>::kVecs; ++k) {
      Lanes<float>::store(to + k * kLanes, rounded(group.v[k], row), Full{});
    }
  }

  template <class Row>
  static Vec rounded(Vec v, Row row) {
    return sizeof(*row.values) == sizeof(T) ? v : Lanes<T>::round_any(v);
  }

  // Both lanes of a pair get its cosine; the first lane gets minus its sine and the second lane its
  // sine, so that both need the same sum.
  void interleave() {
    for (int64_t i = half_ - 1; i >= 0; --i) {  // from the end: the values move up
      cos_[2 * i] = cos_[2 * i + 1] = cos_[i];
      sin_[2 * i + 1] = sin_[i];
      sin_[2 * i] = -sin_[i];
    }
  }

  Vec by_cosine(Vec x, int64_t i) const { return mul(x, Lanes<float>::load(cos_ + i, Full{})); }
  Vec by_sine(Vec x, int64_t i) const { return mul(x, Lanes<float>::load(sin_ + i, Full{})); }

  Rotated rotated(Vec first, Vec second, int64_t i) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      return {sub(by_cosine(first, i), by_sine(second, i)),
              add(by_cosine(second, i), by_sine(first, i))};
    } else {  // products are exact, so these are the same bits
      const Vec sines = Lanes<float>::load(sin_ + i, Full{});
      return {fma(sub(splat(-0.0f), second), sines, by_cosine(first, i)),
              fma(first, sines, by_cosine(second, i))};
    }
  }

  // Write kCount groups from element i of both halves on.
  template <int kCount, class Value>
  __attribute__((always_inline)) void write_groups(T* out, int64_t i, Value value) const {
    Group<T> first[kCount];
    Group<T> second[kCount];
    for (int g = 0; g < kCount; ++g) first[g].set(i + g * kGroup<T>, value);
    for (int g = 0; g < kCount; ++g) second[g].set(half_ + i + g * kGroup<T>, value);
    for (int g = 0; g < kCount; ++g) turn(first[g], second[g], i + g * kGroup<T>);
    for (int g = 0; g < kCount; ++g) first[g].template store<T>(out + i + g * kGroup<T>);
    for (int g = 0; g < kCount; ++g) second[g].template store<T>(out + half_ + i + g * kGroup<T>);
  }

  void turn(Group<T>& first, Group<T>& second, int64_t i) const {
    for (int k = 0; k < Group<T>::kVecs; ++k) {
      const Rotated both = rotated(first.v[k], second.v[k], i + k * kLanes);
      first.v[k] = both.first;
      second.v[k] = both.second;
    }
  }

  // Interleaved pairs: the elements of a pair are in the same lane of the two vectors of a group.
  template <class Ahead>
  void write_groups_of_pairs(T* out, const T* x, Ahead next) const {
    const int64_t grouped = 2 * half_ / kGroup<T> * kGroup<T>;
    for (int64_t i = 0; i < grouped; i += kGroup<T>) {
      next.fetch(i);
      write_group_of_pairs(out + i, x + i, i / 2);
    }
    if (grouped == 2 * half_) return;
    T rest[kGroup<T>] = {};
    const size_t bytes = static_cast<size_t>(2 * half_ - grouped) * sizeof(T);
    memcpy(rest, x + grouped, bytes);
    write_group_of_pairs(rest, rest, grouped / 2);
    memcpy(out + grouped, rest, bytes);
  }

  void write_group_of_pairs(T* out, const T* x, int64_t angle) const {
    Group<T> group = group_of<T>(0, Loaded<T>{x});
    const Rotated both = rotated(group.v[0], group.v[1], angle);
    group.v[0] = both.first;
    group.v[1] = both.second;
    group.template store<T>(out);
  }

  template <class Value>
  void write_pairs(T* out, Value value) const {
    for_each_vec(2 * half_, [=](int64_t i, auto part) {
      const Vec values = value(i, part);
      const Vec sums = add(by_cosine(values, i), by_sine(swap_pairs(values), i));
      Lanes<T>::store(out + i, sums, part);
    });
  }

  const OpweaveRotary& call_;
  int64_t half_;
  int64_t grouped_;  // the number of elements of a half in whole groups
  alignas(64) float cos_[kCapacity];
  alignas(64) float sin_[kCapacity];
};

#if defined(__AVX512FP16__)
// Rotation in float16 arithmetic.
template <>
class Angles<Float16> {
 public:
  explicit Angles(const OpweaveRotary& call) : call_(call), half_(call.rotary_size / 2) {}

  void load(int64_t token) {
    with_angles<Float16>(call_, token, [this](auto row) {
      for_each_halves(half_, [&](int64_t i, auto part) {
        store_halves(cos_ + i, rounded(row, i, part), part);
        store_halves(sin_ + i, rounded(row, half_ + i, part), part);
      });
    });
    if (!call_.is_neox) interleave();
  }

  template <class Value>
  void write_halves(Float16* out, Value value) const {
    for_each_halves(half_, [=](int64_t i, auto part) {
      const Halves first = value(i, part);
      const Halves second = value(half_ + i, part);
      const Halves cosines = load_halves(cos_ + i, part);
      const Halves sines = load_halves(sin_ + i, part);
      store_halves(out + i, sub(mul(first, cosines), mul(second, sines)), part);
      store_halves(out + half_ + i, add(mul(second, cosines), mul(first, sines)), part);
    });
  }

  template <class Ahead>
  void rotate(Float16* out, const Float16* x, Ahead next) const {
    const auto value = fetching(Loaded<Float16>{x}, next);
    if (call_.is_neox) {
      write_halves(out, value);
    } else {
      write_pairs(out, value);
    }
    copy_rest(call_, out, x);
  }

 private:
  template <class Part>
  static Halves rounded(Loaded<Float16> row, int64_t i, Part part) {
    return row(i, part);
  }
  template <class Part>
  static Halves rounded(Loaded<float> row, int64_t i, Part part) {
    return halves_of(i, row, part);
  }

  // As in the primary template.
  void interleave() {
    for (int64_t i = (half_ - 1) / kLanes * kLanes; i >= 0; i -= kLanes) {
      const __m512i cosines = words_at(cos_ + i);
      const __m512i sines = words_at(sin_ + i);
      const __m512i negative = _mm512_xor_si512(sines, _mm512_set1_epi32(0x8000));
      store_words(cos_ + 2 * i, _mm512_or_si512(cosines, _mm512_slli_epi32(cosines, 16)));
      store_words(sin_ + 2 * i, _mm512_or_si512(negative, _mm512_slli_epi32(sines, 16)));
    }
  }
  static __m512i words_at(const Float16* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  template <class Value>
  void write_pairs(Float16* out, Value value) const {
    for_each_halves(2 * half_, [=](int64_t i, auto part) {
      const Halves values = value(i, part);
      const Halves by_cosine = mul(values, load_halves(cos_ + i, part));
      const Halves by_sine = mul(swap_pairs(values), load_halves(sin_ + i, part));
      store_halves(out + i, add(by_cosine, by_sine), part);
    });
  }

  const OpweaveRotary& call_;
  int64_t half_;
  alignas(64) Float16 cos_[OPWEAVE_MAX_ROTARY_SIZE + kHalves];  // room for a vector at the end
  alignas(64) Float16 sin_[OPWEAVE_MAX_ROTARY_SIZE + kHalves];
};
#endif

template <class P>
inline P* moved(P* p, int64_t bytes) {
  return reinterpret_cast<P*>(reinterpret_cast<intptr_t>(p) + bytes);
}

// The heads of the tokens in order, and the addresses to prefetch: 4 KiB plus a number of heads
// ahead.
template <class T>
class Heads {
 public:
  Heads(const OpweaveHeads& heads, int64_t token, int64_t more_ahead = 0)
      : heads_(heads),
        tokens_(heads.tokens, heads.out, heads.x, token),
        ahead_(heads_ahead(heads.count, heads.x_stride, more_ahead)) {}

  // Call visit(out, x, prefetch) for every head of the token, and advance to the next token.
  template <class Visit>
  void for_each(Visit visit) {
    T* out = tokens_.out();
    const T* x = tokens_.x();
    const T* next = moved(x, ahead_ * heads_.x_stride);
    const int64_t last = heads_.count - ahead_;  // from here on, prefetch from the next token
    for (int64_t h = 0; h < heads_.count; ++h) {
      if (h == last) next = tokens_.next_x();
      visit(out, x, next_rows_if<!Tuning::kFollowsPages>(next));
      out = moved(out, heads_.out_stride);
      x = moved(x, heads_.x_stride);
      next = moved(next, heads_.x_stride);
    }
    tokens_.advance();
  }

 private:
  // Return how many heads ahead to prefetch, at most those of a token.
  static int64_t heads_ahead(int64_t count, int64_t stride, int64_t more) {
    constexpr int64_t kAhead = 4096;
    const int64_t heads = (stride <= 0 || stride > kAhead ? 1 : kAhead / stride) + more;
    return heads < count ? heads : count;
  }

  const OpweaveHeads& heads_;
  Rows<T> tokens_;
  int64_t ahead_;
};

template <class T>
class RotatedHeads {
 public:
  RotatedHeads(const OpweaveHeads& heads, int64_t token)
      : heads_(heads, token), is_in_place_(heads.out == heads.x) {}

  void run(const Angles<T>& angles) {
    if (sizeof(T) == sizeof(float) && !is_in_place_) {  // slower with prefetching
      heads_.for_each([&](T* out, const T* x, auto) { angles.rotate(out, x, next_rows()); });
    } else {
      heads_.for_each([&](T* out, const T* x, auto next) { angles.rotate(out, x, next); });
    }
  }

 private:
  Heads<T> heads_;
  bool is_in_place_;
};

// The heads of a call in processing order: the queries of a token, its keys, the next token, ...
template <class T>
class HeadWalk {
 public:
  HeadWalk(const OpweaveRotary& call, int64_t begin, int64_t end)
      : lists_{&call.query, &call.key},
        tokens_{RowCursor(call.query.tokens, begin), RowCursor(call.key.tokens, begin)},
        rest_of_lists_(2 * (end - begin)) {}

  // Return the next heads; repeats the last one at the end.
  template <size_t kCount>
  void next(const T* (&heads)[kCount]) {
    Place at = place_;  // a copy in registers; in memory, each head would wait for a store
    for (const T*& head : heads) {
      while (at.rest == 0 && rest_of_lists_ > 0) begin_list(at);
      if (at.rest > 0) {
        --at.rest;
        at.head = at.next;
        at.next = moved(at.next, at.stride);
      }
      head = at.head;
    }
    place_ = at;
  }

 private:
  struct Place {
    const T* head = nullptr;
    const T* next = nullptr;
    int64_t rest = 0;  // of this list
    int64_t stride = 0;
  };

  void begin_list(Place& at) {
    const int64_t list = rest_of_lists_-- % 2;
    const char* x = static_cast<const char*>(lists_[list]->x);
    at.next = reinterpret_cast<const T*>(tokens_[list].in(x, 1));
    tokens_[list].advance();
    at.rest = lists_[list]->count;
    at.stride = lists_[list]->x_stride;
  }

  const OpweaveHeads* lists_[2];
  RowCursor tokens_[2];
  int64_t rest_of_lists_;
  Place place_;
};

// The norm scales of heads, in the same order. A scale has a long latency, so its computation
// begins before the previous heads are rotated. With 16 bits, the scales of four heads are computed
// at once and the next four heads are prefetched into the L1 cache; 32-bit heads are memory-bound
// anyway.
template <class T>
class HeadScales {
 public:
  static constexpr int kAtOnce = sizeof(T) == sizeof(uint16_t) ? 4 : 1;
  static constexpr int kAhead = kAtOnce == 1 ? 2 : kAtOnce;
  // How many heads further ahead the heads are read than without norms.
  static constexpr int64_t kReadAhead = kAtOnce == 1 ? 0 : kAhead + kAtOnce;

  HeadScales(const OpweaveRotary& call, int64_t begin, int64_t end)
      : heads_(call, begin, end), size_(call.head_size), epsilon_(call.epsilon) {
    if (call.query.count + call.key.count == 0) return;
    heads_.next(upcoming_);
    for (int k = 0; k < kAhead; k += kAtOnce) find(scales_ + k);
  }

  float next() {
    if (at_ % kAtOnce == 0) find(scales_ + (at_ + kAhead) % kKept);
    return scales_[at_++ % kKept];
  }

 private:
  static constexpr int kKept = kAhead + kAtOnce;

  void find(float* scales) {
    const T* heads[kAtOnce];
    memcpy(heads, upcoming_, sizeof heads);
    heads_.next(upcoming_);
    if constexpr (kAtOnce > 1) {
      for (const T* head : upcoming_) prefetch_near(head, size_ * static_cast<int64_t>(sizeof(T)));
    }
    store_inverse_rms(scales, heads, size_, epsilon_);
  }

  HeadWalk<T> heads_;
  const T* upcoming_[kAtOnce];
  int64_t size_;
  float epsilon_;
  uint64_t at_ = 0;
  float scales_[kKept];
};

// Return whether heads have the usual form: neox, and all elements are rotated.
inline bool has_usual_heads(const OpweaveRotary& call) {
  return call.is_neox && call.rotary_size == call.head_size;
}

// A faster product with the norm weights of usual heads, if there is one for T.
template <class T>
struct HeadWeights {
  static constexpr bool kExist = false;
  HeadWeights(const OpweaveRotary&, const OpweaveHeads&) {}
};

// A product p of two bfloat16 numbers is exact in float32. 2^16 p - (2^16 - 1) p, with the second
// term rounded to float32, is p rounded to bfloat16: two instructions for product and rounding. A
// zero loses its sign.
template <>
class HeadWeights<BFloat16> {
 public:
  static constexpr bool kExist = true;

  HeadWeights(const OpweaveRotary& call, const OpweaveHeads& heads) {
    if (!has_usual_heads(call) || heads.weight == nullptr || !(call.epsilon > 0)) return;
    if (call.weight_dtype != OPWEAVE_FLOAT32) load(heads.weight, call.head_size);
  }

  // Whether there are weights, all norm scales are finite, and no product is too large.
  bool serve() const { return serve_; }

  // Return v, element i of a normalized head, times its weight, rounded.
  template <class Part>
  Vec rounded_product(Vec v, int64_t i, Part) const {
    return fma(v, at<Part>(powers_ + i), mul(v, at<Part>(rests_ + i)));
  }

 private:
  void load(const void* weights, int64_t size) {
    const Loaded<BFloat16> value{static_cast<const BFloat16*>(weights)};
    Vec total = splat(0);
    for_each_vec(size, [&](int64_t i, auto part) {
      const Vec weight = value(i, part);
      Lanes<float>::store(powers_ + i, mul(weight, splat(0x1p16f)), Full{});
      Lanes<float>::store(rests_ + i, mul(weight, splat(1 - 0x1p16f)), Full{});
      total = sub(total, negative_abs(weight));
    });
    serve_ = sum(total) < 0x1p90f;
    const int64_t half = size / 2;
    const int64_t grouped = half / kGroup<BFloat16> * kGroup<BFloat16>;
    float* const tables[] = {powers_, rests_};
    for (float* table : tables) {
      order_groups<BFloat16>(table, grouped);
      order_groups<BFloat16>(table + half, grouped);
    }
  }

  template <class Part>
  static Vec at(const float* values) {
    return Lanes<float>::load(values + (kIsOdd<Part> ? kLanes : 0), Full{});
  }

  bool serve_ = false;
  // In the order of groups, padded by one vector.
  alignas(64) float powers_[OPWEAVE_MAX_ROTARY_SIZE + kLanes];
  alignas(64) float rests_[OPWEAVE_MAX_ROTARY_SIZE + kLanes];
};

// Without float16 arithmetic, the weights are widened once, and products are rounded as usual.
template <>
class HeadWeights<Float16> {
 public:
  static constexpr bool kExist = kWidensSlowly<Float16>;

  HeadWeights(const OpweaveRotary& call, const OpweaveHeads& heads) {
    if (!kExist || !has_usual_heads(call) || heads.weight == nullptr) return;
    serve_ = call.weight_dtype != OPWEAVE_FLOAT32;
    if (serve_) widen_row(weights_, static_cast<const Float16*>(heads.weight), call.head_size);
  }

  bool serve() const { return serve_; }

  template <class Part>
  Vec rounded_product(Vec v, int64_t i, Part part) const {
    return Lanes<Float16>::round(mul(v, Lanes<float>::load(weights_ + i, part)));
  }

 private:
  bool serve_ = false;
  alignas(64) float weights_[OPWEAVE_MAX_ROTARY_SIZE];
};

// Normalizes and rotates heads.
template <class T>
class NormalisedHeads {
 public:
  NormalisedHeads(const OpweaveRotary& call, const OpweaveHeads& heads, int64_t token)
      : heads_(heads, token, HeadScales<T>::kReadAhead),
        weights_(call, heads),
        weight_(heads.weight),
        call_(call) {}

  void run(const Angles<T>& angles, HeadScales<T>& scales) {
    if constexpr (HeadWeights<T>::kExist) {
      if (weights_.serve()) {
        return run_usual(angles, scales, [this](const T* x, Vec scale, int64_t i, auto part) {
          const Vec v = Lanes<T>::round_moderate(mul(Lanes<T>::load(x + i, part), scale));
          return weights_.rounded_product(v, i, part);
        });
      }
    }
    with_weight<T>(weight_, call_.weight_dtype, [&](auto weight) {
      using W = decltype(weight);
      if (has_usual_heads(call_)) {
        return run_usual(angles, scales, [=](const T* x, Vec scale, int64_t i, auto part) {
          return stored<W>(Normalized<T, W>{x, weight, scale, is_finite(scale)}(i, part));
        });
      }
      const int64_t size = call_.head_size;
      heads_.for_each([&](T* out, const T* x, auto next) {
        store_normalized<W>(out, size, fetching(normalized(x, weight, scales.next()), next));
        angles.rotate(out, static_cast<const T*>(out), next_rows());
      });
    });
  }

 private:
  // value(x, scale, i, part) is element i of the normalized head x.
  template <class Value>
  void run_usual(const Angles<T>& angles, HeadScales<T>& scales, Value value) {
    heads_.for_each([&](T* out, const T* x, auto next) {
      const Vec scale = splat(scales.next());
      const auto element = [=](int64_t i, auto part) { return value(x, scale, i, part); };
      angles.write_halves(out, fetching(element, next));
    });
  }

  // Results computed only from values of T cannot contain a NaN that the faster rounding would
  // lose.
  template <class W>
  static Vec stored(Vec v) {
    constexpr bool is_of_t = sizeof(typename W::template Widest<T>) == sizeof(T);
    return is_of_t ? Lanes<T>::round(v) : Lanes<T>::round_any(v);
  }
  template <class W>
  static Halves stored(Halves v) {
    return v;
  }

  Heads<T> heads_;
  HeadWeights<T> weights_;
  const void* weight_;
  const OpweaveRotary& call_;
};

struct RotatedTokens {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveRotary& call) {
    Angles<T> angles(call);
    RotatedHeads<T> queries(call.query, begin);
    RotatedHeads<T> keys(call.key, begin);
    for (int64_t token = begin; token < end; ++token) {
      angles.load(token);
      queries.run(angles);
      keys.run(angles);
    }
  }
};

struct NormalisedTokens {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveRotary& call) {
    Angles<T> angles(call);
    HeadScales<T> scales(call, begin, end);
    NormalisedHeads<T> queries(call, call.query, begin);
    NormalisedHeads<T> keys(call, call.key, begin);
    for (int64_t token = begin; token < end; ++token) {
      angles.load(token);
      queries.run(angles, scales);
      keys.run(angles, scales);
    }
  }
};

// Write the rotated keys of a token into its slot; skipped for negative slots.
template <class T>
inline void rotate_into_slot(const OpweaveRotaryToCache& call, int64_t token, const RowCursor& key,
                             const Angles<T>& angles) {
  const OpweaveReshapeAndCache& cache = call.cache;
  const OpweaveHeads& heads = call.rotary.key;
  const int64_t slot = cache.slots[token];
  if (slot < 0) return;
  char* target = first_row(cache.key, slot, cache.block_size);
  const char* x = key.in(static_cast<const char*>(heads.x), 1);
  for (int64_t h = 0; h < heads.count; ++h, x += heads.x_stride) {
    angles.rotate(reinterpret_cast<T*>(target), reinterpret_cast<const T*>(x), next_rows());
    target += cache.key.cache_head_stride;
  }
  write_heads(cache, cache.value, token);
}

void rope_reshape_and_cache(int64_t begin, int64_t end, void* erased) {
  const OpweaveRotaryToCache& call = *static_cast<const OpweaveRotaryToCache*>(erased);
  with_storage(call.rotary.dtype, [&](auto storage) {
    using T = decltype(storage);
    Angles<T> angles(call.rotary);
    RotatedHeads<T> queries(call.rotary.query, begin);
    RowCursor key(call.rotary.key.tokens, begin);
    for (int64_t token = begin; token < end; ++token, key.advance()) {
      angles.load(token);
      queries.run(angles);
      rotate_into_slot(call, token, key, angles);
    }
    after_past_caches();
  });
}

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveRotaryKernels, rotary) = {
    run_for_type<RotatedTokens, OpweaveRotary>,
    run_for_type<NormalisedTokens, OpweaveRotary>,
    rope_reshape_and_cache,
};
