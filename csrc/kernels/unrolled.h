// Loops that are gone before the compiler decides what is kept in registers: sums in an array that
// is indexed by the counter of an ordinary loop, unrolled or not, GCC keeps in memory as well.
#pragma once

#include <utility>

namespace {

template <int I>
struct Index {
  static constexpr int kValue = I;
};

template <class Visit, int... I>
__attribute__((always_inline)) inline void visit_each(Visit& visit,
                                                      std::integer_sequence<int, I...>) {
  (visit(Index<I>{}), ...);
}

// Calls visit(Index<i>{}) for every i below N.
template <int N, class Visit>
__attribute__((always_inline)) inline void unrolled(Visit visit) {
  visit_each(visit, std::make_integer_sequence<int, N>{});
}

}  // namespace
