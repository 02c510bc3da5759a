// Rotary position embedding, alone, after RMS normalisation, or into a paged cache; compiled once
// per instruction set.
//
// The rounding is part of the op's definition: angles, products and sums are each rounded to x's
// type.
#include "kernels/rotary.h"

#include "kernels/cache_rows.h"
#include "kernels/rms.h"
#include "kernels/row_cursor.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_pairs.h"

namespace {

// Cosines and sines of one token, rounded to T and laid out as the vectors of a head need them.
// Past their end is room for one vector, so that they are always read in full.
template <class T>
class Angles {
 public:
  explicit Angles(const OpweaveRotary& call) : call_(call), half_(call.rotary_size / 2) {}

  void load(int64_t token) {
    int64_t position = call_.positions_dtype == OPWEAVE_INT64
                           ? static_cast<const int64_t*>(call_.positions)[token]
                           : static_cast<const int32_t*>(call_.positions)[token];
    if (position < 0) position += call_.cache_rows;
    const int64_t row = position * call_.cache_stride;
    if (call_.cache_dtype == OPWEAVE_FLOAT32) {
      load_row(static_cast<const float*>(call_.cache) + row);
    } else {
      load_row(static_cast<const T*>(call_.cache) + row);
    }
    if (!call_.is_neox) interleave();
  }

  // The first and the second vector of a neox head that are rotated into one another.
  void rotate(T* out, int64_t i, Vec first, Vec second) const {
    const Vec cosines = angle(cos_ + i);
    Lanes<T>::store(out + i, combine(first, cosines, second, angle(minus_sin_ + i)), Full{});
    Lanes<T>::store(out + half_ + i, combine(second, cosines, first, angle(sin_ + i)), Full{});
  }

  // out may be x.
  void rotate(T* out, const T* x) const {
    if (call_.is_neox) {
      rotate_halves(out, x);
    } else {
      rotate_pairs(out, x);
    }
    if (out != x) {
      const int64_t rest = call_.head_size - call_.rotary_size;
      memcpy(out + call_.rotary_size, x + call_.rotary_size, static_cast<size_t>(rest) * sizeof(T));
    }
  }

 private:
  template <class C>
  void load_row(const C* row) {
    for_each_vec(half_, [&](int64_t i, auto part) {
      const Vec sines = Lanes<T>::round(Lanes<C>::load(row + half_ + i, part));
      Lanes<float>::store(cos_ + i, Lanes<T>::round(Lanes<C>::load(row + i, part)), part);
      Lanes<float>::store(sin_ + i, sines, part);
      Lanes<float>::store(minus_sin_ + i, mul(sines, splat(-1)), part);
    });
  }

  // Both lanes of a pair get its cosine; the first one gets minus its sine, the second one the
  // sine.
  void interleave() {
    for (int64_t i = half_ - 1; i >= 0; --i) {  // from the end: the values move up
      cos_[2 * i] = cos_[2 * i + 1] = cos_[i];
      sin_[2 * i + 1] = sin_[i];
      sin_[2 * i] = minus_sin_[i];
    }
  }

  static Vec angle(const float* values) { return Lanes<float>::load(values, Full{}); }

  // Minus a rounded product is the rounded product by minus a factor, so a sum does for both.
  static Vec combine(Vec x, Vec cosines, Vec partner, Vec sines) {
    return add(Lanes<T>::round(mul(x, cosines)), Lanes<T>::round(mul(partner, sines)));
  }

  void rotate_halves(T* out, const T* x) const {
    for_each_vec(half_, [&](int64_t i, auto part) {
      const Vec first = Lanes<T>::load(x + i, part);
      const Vec second = Lanes<T>::load(x + half_ + i, part);
      const Vec cosines = angle(cos_ + i);
      Lanes<T>::store(out + i, combine(first, cosines, second, angle(minus_sin_ + i)), part);
      Lanes<T>::store(out + half_ + i, combine(second, cosines, first, angle(sin_ + i)), part);
    });
  }

  void rotate_pairs(T* out, const T* x) const {
    for_each_vec(2 * half_, [&](int64_t i, auto part) {
      const Vec values = Lanes<T>::load(x + i, part);
      const Vec rotated = combine(values, angle(cos_ + i), swap_pairs(values), angle(sin_ + i));
      Lanes<T>::store(out + i, rotated, part);
    });
  }

  static constexpr int64_t kCapacity = OPWEAVE_MAX_ROTARY_SIZE + kLanes;

  const OpweaveRotary& call_;
  int64_t half_;
  alignas(64) float cos_[kCapacity];
  alignas(64) float sin_[kCapacity];
  alignas(64) float minus_sin_[kCapacity];
};

// Calls visit(out, x) for every head of the token under the cursor.
template <class T, class Visit>
inline void for_each_head(const OpweaveHeads& heads, const RowCursor& token, Visit visit) {
  char* out = token.in(static_cast<char*>(heads.out), 0);
  const char* x = token.in(static_cast<const char*>(heads.x), 1);
  for (int64_t h = 0; h < heads.count; ++h, out += heads.out_stride, x += heads.x_stride) {
    visit(reinterpret_cast<T*>(out), reinterpret_cast<const T*>(x));
  }
}

struct Rotate {
  template <class T>
  static void run(const OpweaveRotary&, const OpweaveHeads& heads, const RowCursor& token,
                  const Angles<T>& angles) {
    for_each_head<T>(heads, token, [&](T* out, const T* x) { angles.rotate(out, x); });
  }
};

// One head of any size and rotation.
template <class T, class W>
inline void normalise_and_rotate(T* out, const T* x, W weight, const OpweaveRotary& call,
                                 const Angles<T>& angles) {
  const int64_t width = call.head_size;
  const float scale = inverse_rms(sum_of_squares(x, width), width, call.epsilon);
  write_normalised(out, x, weight, scale, width);
  angles.rotate(out, out);
}

// A head of kVecs vectors, all of which rotate as neox: it is read once, and stays in registers.
template <int kVecs, class T, class W>
inline void normalise_and_rotate_in_registers(T* out, const T* x, W weight,
                                              const OpweaveRotary& call,
                                              const Angles<T>& angles) {
  Vec head[kVecs];
  const float squares = sum_of_squares(kVecs * kLanes, [&](int64_t i, auto part) {
    return head[i / kLanes] = Lanes<T>::load(x + i, part);
  });
  const Vec scale = splat(inverse_rms(squares, kVecs * kLanes, call.epsilon));
  for (int k = 0; k < kVecs; ++k) {
    head[k] = Lanes<T>::stored(weight.apply(mul(head[k], scale), k * kLanes, Full{}));
  }
  for (int k = 0; k < kVecs / 2; ++k) {
    angles.rotate(out, k * kLanes, head[k], head[k + kVecs / 2]);
  }
}

struct NormaliseAndRotate {
  template <class T>
  static void run(const OpweaveRotary& call, const OpweaveHeads& heads, const RowCursor& token,
                  const Angles<T>& angles) {
    const int64_t vecs = call.is_neox && call.rotary_size == call.head_size &&
                                 call.head_size % kLanes == 0
                             ? call.head_size / kLanes
                             : 0;
    with_weight<T>(heads.weight, call.weight_dtype, [&](auto weight) {
      for_each_head<T>(heads, token, [&](T* out, const T* x) {
        switch (vecs) {
          case 4: return normalise_and_rotate_in_registers<4>(out, x, weight, call, angles);
          case 8: return normalise_and_rotate_in_registers<8>(out, x, weight, call, angles);
          case 16: return normalise_and_rotate_in_registers<16>(out, x, weight, call, angles);
          default: return normalise_and_rotate(out, x, weight, call, angles);
        }
      });
    });
  }
};

template <class Heads>
struct TokenRows {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveRotary& call) {
    Angles<T> angles(call);
    RowCursor query(call.query.tokens, begin);
    RowCursor key(call.key.tokens, begin);
    for (int64_t token = begin; token < end; ++token, query.advance(), key.advance()) {
      angles.load(token);
      Heads::run(call, call.query, query, angles);
      Heads::run(call, call.key, key, angles);
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
    angles.rotate(reinterpret_cast<T*>(target), reinterpret_cast<const T*>(x));
    target += cache.block_size * cache.key.row_bytes;
  }
  write_heads(cache.value, token, slot, cache.heads, cache.block_size);
}

void rope_reshape_and_cache(int64_t begin, int64_t end, void* erased) {
  const OpweaveRotaryToCache& call = *static_cast<const OpweaveRotaryToCache*>(erased);
  with_storage(call.rotary.dtype, [&](auto storage) {
    using T = decltype(storage);
    Angles<T> angles(call.rotary);
    RowCursor query(call.rotary.query.tokens, begin);
    RowCursor key(call.rotary.key.tokens, begin);
    for (int64_t token = begin; token < end; ++token, query.advance(), key.advance()) {
      angles.load(token);
      Rotate::run(call.rotary, call.rotary.query, query, angles);
      rotate_into_slot(call, token, key, angles);
    }
  });
}

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveRotaryKernels, rotary) = {
    run_for_type<TokenRows<Rotate>, OpweaveRotary>,
    run_for_type<TokenRows<NormaliseAndRotate>, OpweaveRotary>,
    rope_reshape_and_cache,
};
