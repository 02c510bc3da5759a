// Rotary position embedding, alone, after RMS normalisation, or into a paged cache; compiled once
// per instruction set.
//
// Angles are rounded to x's type, as in the op's definition. What they make of x is rounded once:
// products of 16-bit numbers are exact in float32, and the sum of two is rounded there and to x's
// type, with the same bits on every instruction set that has no arithmetic in float16 itself. With
// that, each step is rounded, as in the op's definition.
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

// Vectors of the two halves of a neox head.
struct Rotated {
  Vec first;
  Vec second;
};

// Call visit with the angles of one token: half of them cosines, then the sines.
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

// Past the dimensions that rotate.
template <class T>
inline void copy_rest(const OpweaveRotary& call, T* out, const T* x) {
  if (out == x) return;
  const int64_t rest = call.head_size - call.rotary_size;
  memcpy(out + call.rotary_size, x + call.rotary_size, static_cast<size_t>(rest) * sizeof(T));
}

// Cosines and sines of one token, rounded to T and laid out as the vectors of a head need them.
// Past their end is room for one vector, so that they are always read in full.
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
    order_groups<T>(cos_, grouped_);
    order_groups<T>(sin_, grouped_);
  }

  // Rotate the halves of a neox head, whose elements are value(i, part), into one another. It may
  // read what is written to its own elements.
  template <class Value>
  void write_halves(T* out, Value value) const {
    for (int64_t i = 0; i < grouped_; i += kGroup<T>) {
      store(out + i, i, group_of<T>(i, value), group_of<T>(half_ + i, value));
    }
    for_each_vec(half_ - grouped_, [=](int64_t past, auto part) {
      const int64_t i = grouped_ + past;
      const Rotated both = rotated(value(i, part), value(half_ + i, part), i);
      Lanes<T>::store(out + i, both.first, part);
      Lanes<T>::store(out + half_ + i, both.second, part);
    });
  }

  // out may be x; next is fetched.
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

  // Zeros follow the last angle, up to a whole vector.
  template <class Row>
  void load_row(Row row) {
    for_each_vec(half_, [&](int64_t i, auto part) {
      Lanes<float>::store(cos_ + i, Lanes<T>::round_any(row(i, part)), Full{});
      Lanes<float>::store(sin_ + i, Lanes<T>::round_any(row(half_ + i, part)), Full{});
    });
  }

  // Both lanes of a pair get its cosine; the first one gets minus its sine, the second one the
  // sine, so that a sum does for both.
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

  // Groups at element i of both halves.
  void store(T* out, int64_t i, Group<T> first, Group<T> second) const {
    for (int k = 0; k < Group<T>::kVecs; ++k) {
      const Rotated both = rotated(first.v[k], second.v[k], i + k * kLanes);
      first.v[k] = both.first;
      second.v[k] = both.second;
    }
    first.template store<T>(out);
    second.template store<T>(out + half_);
  }

  // A group has what turns together in the same lane of its two vectors.
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
  int64_t grouped_;  // how much of a half falls into groups
  alignas(64) float cos_[kCapacity];
  alignas(64) float sin_[kCapacity];
};

#if defined(__AVX512FP16__)
// In float16 itself.
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

  // As without float16.
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

// The heads of one token after the other.
template <class T>
class Heads {
 public:
  Heads(const OpweaveHeads& heads, int64_t token)
      : heads_(heads),
        tokens_(heads.tokens, heads.out, heads.x, token),
        ahead_(heads_ahead(heads.count, heads.x_stride)) {}

  // Calls visit(out, x, what to fetch) for every head, and goes on to the next token.
  template <class Visit>
  void for_each(Visit visit) {
    T* out = tokens_.out();
    const T* x = first();
    const T* next = moved(x, ahead_ * heads_.x_stride);
    const int64_t last = heads_.count - ahead_;  // that has the one to fetch in its own token
    for (int64_t h = 0; h < heads_.count; ++h) {
      if (h == last) next = tokens_.next_x();
      visit(out, x, next_rows(next));
      out = moved(out, heads_.out_stride);
      x = after(x);
      next = after(next);
    }
    tokens_.advance();
  }

  int64_t count() const { return heads_.count; }
  const T* first() const { return tokens_.x(); }
  const T* after(const T* x) const { return moved(x, heads_.x_stride); }

 private:
  template <class P>
  static P* moved(P* p, int64_t bytes) {
    return reinterpret_cast<P*>(reinterpret_cast<intptr_t>(p) + bytes);
  }

  // So many that 4 KiB lie between, or those of a token.
  static int64_t heads_ahead(int64_t count, int64_t stride) {
    constexpr int64_t kAhead = 4096;
    const int64_t heads = stride <= 0 || stride > kAhead ? 1 : kAhead / stride;
    return heads < count ? heads : count;
  }

  const OpweaveHeads& heads_;
  Rows<T> tokens_;
  int64_t ahead_;
};

template <class T>
class RotatedHeads {
 public:
  RotatedHeads(const OpweaveRotary&, const OpweaveHeads& heads, int64_t token)
      : heads_(heads, token) {}

  void run(const Angles<T>& angles) {
    heads_.for_each([&](T* out, const T* x, auto next) { angles.rotate(out, x, next); });
  }

 private:
  Heads<T> heads_;
};

// Heads are normalised, then rotated.
template <class T>
class NormalisedHeads {
 public:
  // The usual heads: all of them rotates, as neox.
  NormalisedHeads(const OpweaveRotary& call, const OpweaveHeads& heads, int64_t token)
      : heads_(heads, token),
        weight_(heads.weight),
        call_(call),
        size_(call.head_size),
        is_usual_(call.is_neox && call.rotary_size == size_) {}

  void run(const Angles<T>& angles) {
    with_weight<T>(weight_, call_.weight_dtype, [&](auto weight) {
      if (is_usual_) return run_usual(weight, angles);
      heads_.for_each([&](T* out, const T* x, auto next) {
        store_normalised<decltype(weight)>(out, size_,
                                           fetching(normalised(x, weight, scale_of(x)), next));
        angles.rotate(out, static_cast<const T*>(out), next_rows());
      });
    });
  }

 private:
  float scale_of(const T* head) const {
    return inverse_rms(sum_of_squares(head, size_), size_, call_.epsilon);
  }

  // A scale takes long to come, so it is begun before the two heads in front of it are rotated.
  template <class W>
  void run_usual(W weight, const Angles<T>& angles) {
    const T* ahead = heads_.first();
    int64_t rest = heads_.count();
    const auto scale_ahead = [&] {
      if (rest-- <= 0) return 0.0f;
      const float scale = scale_of(ahead);
      ahead = heads_.after(ahead);
      return scale;
    };
    float first = scale_ahead();
    float second = scale_ahead();
    heads_.for_each([&](T* out, const T* x, auto next) {
      const Vec scale = splat(first);
      first = second;
      second = scale_ahead();
      const auto rounded = [=](int64_t i, auto part) {
        return stored(Normalised<T, W>{x, weight, scale}(i, part), weight);
      };
      angles.write_halves(out, fetching(rounded, next));
    });
  }

  // What was made of values of T alone has no NaN that the quicker rounding could lose.
  template <class W>
  static Vec stored(Vec v, W) {
    constexpr bool is_of_t = sizeof(typename W::template Widest<T>) == sizeof(T);
    return is_of_t ? Lanes<T>::round(v) : Lanes<T>::round_any(v);
  }
  template <class W>
  static Halves stored(Halves v, W) {
    return v;
  }

  Heads<T> heads_;
  const void* weight_;
  const OpweaveRotary& call_;
  int64_t size_;
  bool is_usual_;
};

template <template <class> class HeadsOfTokens>
struct TokenRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveRotary& call) {
    Angles<T> angles(call);
    HeadsOfTokens<T> queries(call, call.query, begin);
    HeadsOfTokens<T> keys(call, call.key, begin);
    for (int64_t token = begin; token < end; ++token) {
      angles.load(token);
      queries.run(angles);
      keys.run(angles);
    }
  }
};

// The keys of a token go to its slot, and nowhere if it has none.
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
    target += cache.block_size * cache.key.row_bytes;
  }
  write_heads(cache, cache.value, token);
}

void rope_reshape_and_cache(int64_t begin, int64_t end, void* erased) {
  const OpweaveRotaryToCache& call = *static_cast<const OpweaveRotaryToCache*>(erased);
  with_storage(call.rotary.dtype, [&](auto storage) {
    using T = decltype(storage);
    Angles<T> angles(call.rotary);
    RotatedHeads<T> queries(call.rotary, call.rotary.query, begin);
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
    run_for_type<TokenRows<RotatedHeads>, OpweaveRotary>,
    run_for_type<TokenRows<NormalisedHeads>, OpweaveRotary>,
    rope_reshape_and_cache,
};
