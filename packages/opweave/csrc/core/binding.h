// Conversion between the values of a call and the parameters and results of a C++ function.
//
//   schema    parameter              schema    result
//   Tensor    const View&            ()        void
//   Tensor?   const View*            int       int64_t
//   int       int64_t                float     double
//   float     double                 bool      bool
//   bool      bool                   (a, b)    std::tuple<A, B>
//   int[]     IntList
//   T?        std::optional<T>       for T of int, float, bool and int[]
#pragma once

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "int_list.h"
#include "schema.h"
#include "view.h"

namespace opweave {

union Scalar {
  int64_t integer;
  double number;
  bool flag;
};

// One argument of a call; the schema determines which member is set. Not initialized on purpose: a
// call has kMaxArguments of these on its stack and only fills those it uses.
struct Value {
  Value() {}
  union {
    View view;
    Scalar scalar;
    IntList list;
  };
  bool present;  // false: None was passed for an optional argument
};

// Maps the parameter or result type T to a schema type. Only the specializations below are defined.
template <class T>
struct Binding {
  static constexpr bool kKnown = false;
  static constexpr bool kIsResult = false;
  // Declared for unsupported types too, so that the only compile error is the static_assert of
  // Caller or Returns.
  static constexpr Type kType{Kind::kTensor, false};
  static T get(const Value& value);
  static Scalar put(const T& result);
};

struct Parameter {
  static constexpr bool kKnown = true;
  static constexpr bool kIsResult = false;
  template <class T>
  static Scalar put(const T& result);  // not defined, as above
};

struct ParameterOrResult {
  static constexpr bool kKnown = true;
  static constexpr bool kIsResult = true;
};

template <>
struct Binding<const View&> : Parameter {
  static constexpr Type kType{Kind::kTensor, false};
  static const View& get(const Value& value) { return value.view; }
};

template <>
struct Binding<const View*> : Parameter {
  static constexpr Type kType{Kind::kTensor, true};
  static const View* get(const Value& value) { return value.present ? &value.view : nullptr; }
};

template <>
struct Binding<int64_t> : ParameterOrResult {
  static constexpr Type kType{Kind::kInteger, false};
  static int64_t get(const Value& value) { return value.scalar.integer; }
  static Scalar put(int64_t result) { return Scalar{result}; }
};

template <>
struct Binding<double> : ParameterOrResult {
  static constexpr Type kType{Kind::kNumber, false};
  static double get(const Value& value) { return value.scalar.number; }
  static Scalar put(double result) {
    Scalar scalar;
    scalar.number = result;
    return scalar;
  }
};

template <>
struct Binding<bool> : ParameterOrResult {
  static constexpr Type kType{Kind::kFlag, false};
  static bool get(const Value& value) { return value.scalar.flag; }
  static Scalar put(bool result) {
    Scalar scalar;
    scalar.flag = result;
    return scalar;
  }
};

template <>
struct Binding<IntList> : Parameter {
  static constexpr Type kType{Kind::kIntegerList, false};
  static IntList get(const Value& value) { return value.list; }
};

template <class T>
struct Binding<std::optional<T>> : Parameter {
  static constexpr bool kKnown = Binding<T>::kKnown && Binding<T>::kType.kind != Kind::kTensor;
  static constexpr Type kType{Binding<T>::kType.kind, true};
  static std::optional<T> get(const Value& value) {
    return value.present ? std::optional<T>(Binding<T>::get(value)) : std::nullopt;
  }
};

// The result of a function: void, one number, or a tuple.
template <class Result>
struct Returns {
  static_assert(Binding<Result>::kIsResult,
                "an op returns void, int64_t, double, bool, or a std::tuple of these");
  static std::vector<Kind> kinds() { return {Binding<Result>::kType.kind}; }
  static void put(Result result, Scalar* slots) { slots[0] = Binding<Result>::put(result); }
};

template <>
struct Returns<void> {
  static std::vector<Kind> kinds() { return {}; }
};

template <class... Results>
struct Returns<std::tuple<Results...>> {
  static_assert((Binding<Results>::kIsResult && ...),
                "an op returns void, int64_t, double, bool, or a std::tuple of these");
  static std::vector<Kind> kinds() { return {Binding<Results>::kType.kind...}; }
  static void put(const std::tuple<Results...>& results, Scalar* slots) {
    put_each(results, slots, std::index_sequence_for<Results...>{});
  }

 private:
  template <size_t... I>
  static void put_each(const std::tuple<Results...>& results, Scalar* slots,
                       std::index_sequence<I...>) {
    ((slots[I] = Binding<Results>::put(std::get<I>(results))), ...);
  }
};

// Calls a function with the converted values of a call.
template <class Result, class... Parameters>
struct Caller {
  static_assert((Binding<Parameters>::kKnown && ...),
                "a parameter is const View&, const View*, int64_t, double, bool, IntList, or a "
                "std::optional of one of the last four");

  static void call(Result (*function)(Parameters...), const Value* values, Scalar* results) {
    call(function, values, results, std::index_sequence_for<Parameters...>{});
  }

 private:
  template <size_t... I>
  static void call(Result (*function)(Parameters...), [[maybe_unused]] const Value* values,
                   [[maybe_unused]] Scalar* results, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
      function(Binding<Parameters>::get(values[I])...);
    } else {
      Returns<Result>::put(function(Binding<Parameters>::get(values[I])...), results);
    }
  }
};

}  // namespace opweave
