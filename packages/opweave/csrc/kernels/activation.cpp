// Activations, compiled once per instruction set.
//
// All computations are in float32; Lanes<T>::round is called wherever the op's definition rounds to
// the type of x. The definitions are in packages/opweave/src/opweave/ir/ops/activation.py.
#include "kernels/activation.h"

#include "kernels/load_pairs.h"
#include "kernels/moments.h"
#include "kernels/prefetch.h"
#include "kernels/result_table.h"
#include "kernels/rows.h"
#include "kernels/storage.h"
#include "kernels/table.h"
#include "kernels/vec_group.h"
#include "kernels/vec_math.h"

namespace {

// sqrt(2 / pi), and its value with ten digits from the definition of gelu_fast.
constexpr float kSqrt2OverPi = 0.7978845608028654f;
constexpr float kTenDigits = 0.7978845608f;
constexpr float kCubic = 0.044715f;

inline Vec keep_positive(Vec x) { return max(splat(0), x); }  // preserves NaN

template <class T>
struct Gelu {
  explicit Gelu(const OpweaveActivation&) {}
  Vec operator()(Vec x) const { return mul(x, MathFor<T>::normal(x)); }
};

template <class T>
struct GeluTanh {
  explicit GeluTanh(const OpweaveActivation&) {}
  Vec operator()(Vec x) const {
    // (1 + tanh(a)) / 2 = sigmoid(2 * a), which is accurate for small results.
    const Vec cubic = fma(mul(splat(kCubic), mul(x, x)), x, x);
    return MathFor<T>::gated(x, cubic, 2 * kSqrt2OverPi);
  }
};

template <class T>
constexpr bool kIsApproximate<Gelu<T>> = true;
template <class T>
constexpr bool kIsApproximate<GeluTanh<T>> = true;

template <class T>
struct Fatrelu {
  explicit Fatrelu(const OpweaveActivation& call) : threshold(splat(call.parameters[0])) {}
  Vec operator()(Vec x) const { return select(at_most(x, threshold), splat(0), x); }
  Vec threshold;
};

template <class T>
struct GeluNew {
  explicit GeluNew(const OpweaveActivation&) {}
  Vec operator()(Vec x) const {
    const Vec cube = round(mul(round(mul(x, x)), x));
    const Vec inner = round(add(x, round(mul(splat(kCubic), cube))));
    const Vec t = round(MathFor<T>::tanh(round(mul(splat(kSqrt2OverPi), inner))));
    return mul(round(mul(splat(0.5f), x)), round(add(splat(1), t)));
  }
  static Vec round(Vec v) { return Lanes<T>::round(v); }
};

template <class T>
struct GeluFast {
  explicit GeluFast(const OpweaveActivation&) {}
  Vec operator()(Vec x) const {
    const Vec square = round(mul(round(mul(splat(kCubic), x)), x));
    const Vec inner = mul(round(mul(x, splat(kTenDigits))), round(add(splat(1), square)));
    const Vec t = round(MathFor<T>::tanh(round(inner)));
    return mul(round(mul(splat(0.5f), x)), round(add(splat(1), t)));
  }
  static Vec round(Vec v) { return Lanes<T>::round(v); }
};

template <class T>
struct QuickGelu {
  explicit QuickGelu(const OpweaveActivation&) {}
  Vec operator()(Vec x) const {
    const Vec scaled = Lanes<T>::round(mul(splat(1.702f), x));
    return mul(x, Lanes<T>::round(MathFor<T>::sigmoid(scaled)));
  }
};

template <class T>
struct Relu2 {
  explicit Relu2(const OpweaveActivation&) {}
  Vec operator()(Vec x) const {
    const Vec positive = keep_positive(x);
    return mul(positive, positive);
  }
};

template <class T>
struct Xielu {
  explicit Xielu(const OpweaveActivation& call)
      : beta(splat(call.parameters[0])),
        eps(Lanes<T>::round(splat(call.parameters[1]))),
        alpha_p(splat(softplus(call.alpha_p))),
        alpha_n(Lanes<T>::round(add(beta, splat(softplus(call.alpha_n))))) {}

  Vec operator()(Vec x) const {
    const Vec linear = round(mul(beta, x));
    const Vec positive = round(mul(round(mul(alpha_p, x)), x));
    const Vec curve = round(expm1(min(eps, x)));
    const Vec negative = round(mul(round(sub(curve, x)), alpha_n));
    return add(select(less(splat(0), x), positive, negative), linear);
  }

  static Vec round(Vec v) { return Lanes<T>::round(v); }

  // Return softplus of a learned parameter, rounded to its type.
  static float softplus(const void* number) {
    const float a = sum(Lanes<T>::load(static_cast<const T*>(number), Tail{1}));
    const float value = a > 20 ? a : __builtin_log1pf(__builtin_expf(a));
    return sum(keep(Lanes<T>::round(splat(value)), Tail{1}));
  }

  Vec beta;
  Vec eps;
  Vec alpha_p;
  Vec alpha_n;
};

template <class T>
struct SwigluoaiGate {
  explicit SwigluoaiGate(const OpweaveActivation& call)
      : alpha(splat(call.parameters[0])), limit(Lanes<T>::round(splat(call.parameters[1]))) {}
  Vec operator()(Vec x) const {
    const Vec gate = min(limit, x);  // argument order preserves NaN
    return mul(gate, round(MathFor<T>::sigmoid(round(mul(gate, alpha)))));
  }
  static Vec round(Vec v) { return Lanes<T>::round(v); }

  Vec alpha;
  Vec limit;
};

template <class T>
struct Row {
  Row from(int64_t i) const { return {out + i, x + i}; }

  T* out;
  const T* x;
};

// Call body(row, next row) for every row.
template <class T, class Body>
inline void for_each_row(int64_t begin, int64_t end, const OpweaveActivation& call, Body body,
                         int64_t ahead = 1) {
  Rows<T> rows(call.rows, call.out, call.x, begin, ahead);
  for (int64_t r = begin; r < end; ++r, rows.advance()) {
    body(Row<T>{rows.out(), rows.x()}, Row<const T>{rows.next_out(), rows.next_x()});
  }
}

// Whether looking up a 16-bit result is faster than computing the activation.
template <class Activation>
constexpr bool kIsLong = true;
template <class T>
constexpr bool kIsLong<Fatrelu<T>> = false;
template <class T>
constexpr bool kIsLong<Relu2<T>> = false;

// From this many bytes per thread, the rows are not in a CPU cache. The cheapest kernels, which are
// memory-bound, then prefetch 4 KiB ahead, because a whole row is too far ahead for long rows.
constexpr int64_t kInNoCache = 4 << 20;
template <class T>
constexpr int64_t kAhead = 4096 / static_cast<int64_t>(sizeof(T));

template <template <class> class Activation>
struct Elementwise {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveActivation& call) {
    const Activation<T> activation(call);
    if constexpr (kIsLong<Activation<T>> && sizeof(T) == sizeof(uint16_t)) {
      if (ResultTable<T>::is_worth_it((end - begin) * call.width)) {
        const ResultTable<T> table(activation);
        return for_each_row<T>(begin, end, call, [&](Row<T> row, Row<const T> next) {
          table.look_up().copy(row.out, row.x, call.width, next_rows(next.x, next.out));
        });
      }
    }
    const int64_t bytes = (end - begin) * call.width * static_cast<int64_t>(sizeof(T));
    for_each_row<T>(begin, end, call, [&](Row<T> row, Row<const T> next) {
      constexpr bool kIsWanted = is_fetched<T>();
      if constexpr (kIsLong<Activation<T>>) {
        write<kIsWanted>(activation, row, next, call.width);
      } else if (bytes < kInNoCache) {
        write<false>(activation, row, next, call.width);
      } else {
        const int64_t near = call.width > kAhead<T> ? call.width - kAhead<T> : 0;
        write<kIsWanted>(activation, row, {row.out + kAhead<T>, row.x + kAhead<T>}, near);
        write<kIsWanted>(activation, row.from(near), next, call.width - near);
      }
    });
  }

 private:
  // Prefetch float32 on every CPU, because the computation is cheap.
  template <class T>
  static constexpr bool is_fetched() {
    const bool waits_for_memory = sizeof(T) == sizeof(float) && !kIsLong<Activation<T>>;
    return kIsFetched<T> && (!Tuning::kFollowsPages || waits_for_memory);
  }

  template <bool kIsWanted, class T>
  static void write(const Activation<T>& activation, Row<T> row, Row<const T> next, int64_t n) {
    const auto value = [=](int64_t i, auto part) {
      return activation(Lanes<T>::load(row.x + i, part));
    };
    store_row<T, kAtOnce>(row.out, n, fetching_if<kIsWanted>(value, next_rows(next.x, next.out)));
  }
};

// Call visit with the rounded results of the activation for rows from begin to end.
template <class Activation, class T, bool kMayLookUp, class Visit>
inline void with_activated(int64_t begin, int64_t end, const OpweaveActivation& call, Visit visit) {
  with_rounded<T, kMayLookUp>(Activation(call), (end - begin) * call.width, visit);
}

// Activates one half of a row, and multiplies it with the other half.
template <template <class> class Activation, bool kSecondHalf = false>
struct Gated {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveActivation& call) {
    // Gathering is slower here if the data is not in a CPU cache.
    constexpr bool kMayLookUp = kIsLong<Activation<T>> && !kGathers;
    with_activated<Activation<T>, T, kMayLookUp>(begin, end, call, [&](auto activated) {
      for_each_row<T>(begin, end, call, [&](Row<T> row, Row<const T> next) {
        const T* gate = row.x + (kSecondHalf ? call.width : 0);
        const T* other = row.x + (kSecondHalf ? 0 : call.width);
        const GatedProduct<T, decltype(activated)> product{activated, gate, other};
        constexpr int kBegun = decltype(activated)::kBegun;
        store_row<T, kBegun>(row.out, call.width,
                             fetching_if<kIsFetched<T>>(product, ahead(next, next.x + call.width)));
      });
    });
  }

 private:
  // Prefetch both halves of the input, and the output.
  template <class T>
  static auto ahead(Row<const T> next, const T* other) {
    if constexpr (kFollowsRows<T> && kIsLong<Activation<T>>) {
      return next_rows(next.x, other);
    } else {
      return next_rows(next.x, other, next.out);
    }
  }
};

// act(relu(gate - bound)) times the elements of `other`; the products are not rounded.
template <class T, class Activated>
struct SparseProduct {
  template <class Part>
  auto operator()(int64_t i, Part part) const {
    const auto x = Loaded<T>{gate}(i, part);
    const auto above = max(like(x, splat(0)), rounded<T>(sub(x, like(x, bound))));
    return mul(activated.of(above), Loaded<T>{other}(i, part));
  }

  Activated activated;
  const T* gate;
  const T* other;
  Vec bound;
};

template <class Activated>
constexpr bool kGivesHalves<SparseProduct<Float16, Activated>> = kHasHalves;

// Gates are relu(x - bound), where the bound is the mean plus std_multiplier standard deviations.
template <template <class> class Activation>
struct SparseGated {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveActivation& call) {
    with_activated<Activation<T>, T, kGathersFaster<T>>(begin, end, call, [&](auto activated) {
      const auto write = [&](Row<T> row, Row<const T> next) {
        const Vec bound = cutoff(row.x, call.width, call.parameters[0]);
        const SparseProduct<T, decltype(activated)> product{activated, row.x, row.x + call.width,
                                                            bound};
        store_row<T, kAtOnce>(row.out, call.width,
                              fetching(product, next_rows(next.x, next.x + call.width, next.out)));
      };
      for_each_row<T>(begin, end, call, write, rows_ahead<T>(call.width));
    });
  }

  template <class T>
  static Vec cutoff(const T* gate, int64_t width, float std_multiplier) {
    const float mean = mean_of(gate, width);
    const Vec deviation = Lanes<T>::round(splat(deviation_of(gate, width, mean)));
    const Vec distance = Lanes<T>::round(mul(deviation, splat(std_multiplier)));
    return Lanes<T>::round(add(Lanes<T>::round(splat(mean)), distance));
  }
};

// The activated first element of every pair, times the clamped second element plus one; the
// products are not rounded.
template <class T, class Glu>
struct SwigluoaiProduct {
  template <class Part>
  auto operator()(int64_t i, Part part) const {
    const T* pairs = x + 2 * i;
    const auto up = load_pairs(pairs, part).second;
    const auto bounded = min(like(up, limit), max(like(up, sub(splat(0), limit)), up));
    return mul(rounded<T>(add(bounded, like(up, splat(1)))), glu.load_first(pairs, part));
  }

  Glu glu;
  const T* x;
  Vec limit;
};

template <class Glu>
constexpr bool kGivesHalves<SwigluoaiProduct<Float16, Glu>> = kHasHalves;

// Gates and linear units alternate in a row.
struct Swigluoai {
  template <class T>
  static void run(int64_t begin, int64_t end, const OpweaveActivation& call) {
    const Vec limit = Lanes<T>::round(splat(call.parameters[1]));
    with_activated<SwigluoaiGate<T>, T, true>(begin, end, call, [&](auto glu) {
      for_each_row<T>(begin, end, call, [&](Row<T> row, Row<const T> next) {
        using Product = SwigluoaiProduct<T, decltype(glu)>;
        const Product product{glu, row.x, limit};
        constexpr int64_t kStep = kGivesHalves<Product> ? 2 * kLanes : kLanes;
        const auto* pairs = reinterpret_cast<const T(*)[2]>(next.x);
        if constexpr (Tuning::kFollowsPages) {
          store_vecs(row.out, call.width, product);
        } else if constexpr (kStep * sizeof(*pairs) > kCacheLine) {  // two cache lines
          store_vecs(row.out, call.width,
                     fetching(product, next_rows(pairs, pairs + kStep / 2, next.out)));
        } else {
          store_vecs(row.out, call.width, fetching(product, next_rows(pairs, next.out)));
        }
      });
    });
  }
};

}  // namespace

OPWEAVE_KERNEL_TABLE(OpweaveActivationKernels, activation) = {
    run_for_type<Gated<Silu>, OpweaveActivation>,
    run_for_type<Gated<Silu, true>, OpweaveActivation>,
    run_for_type<Gated<Gelu>, OpweaveActivation>,
    run_for_type<Gated<GeluTanh>, OpweaveActivation>,
    run_for_type<SparseGated<Gelu>, OpweaveActivation>,
    run_for_type<SparseGated<GeluTanh>, OpweaveActivation>,
    run_for_type<Gated<Fatrelu>, OpweaveActivation>,
    run_for_type<Swigluoai, OpweaveActivation>,
    run_for_type<Elementwise<GeluNew>, OpweaveActivation>,
    run_for_type<Elementwise<GeluFast>, OpweaveActivation>,
    run_for_type<Elementwise<QuickGelu>, OpweaveActivation>,
    run_for_type<Elementwise<Relu2>, OpweaveActivation>,
    run_for_type<Elementwise<Xielu>, OpweaveActivation>,
};
