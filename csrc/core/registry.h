// Registration of native ops: any number of files, one module.
//
//   OPWEAVE_EXTENSION_MODULE(m) {
//     m.def("scale(Tensor(a!) out, Tensor x, float factor) -> ()", scale);
//   }
//
// where `void scale(const View& out, const View& x, double factor)`. The schema decides what an
// argument is; a function whose parameters do not match it is an error when the module is loaded.
//
//   schema    parameter
//   Tensor    const View&
//   Tensor?   const View*   (null for None)
//   int       int64_t
//   float     double
//   bool      bool
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/schema.h"
#include "core/view.h"

namespace opweave {

constexpr size_t kMaxArguments = 16;

// One argument of a call; which member holds it follows from the schema. Deliberately without
// initialisers: a call builds kMaxArguments of these on its stack and fills the ones it uses.
struct Value {
  View view;
  union {
    int64_t integer;
    double number;
    bool flag;
  };
};

template <class Parameter>
struct Binding;  // no definition: the parameter type is not one of those listed above

template <>
struct Binding<const View&> {
  static constexpr Kind kKind = Kind::kTensor;
  static const View& get(const Value& value) { return value.view; }
};

template <>
struct Binding<const View*> {
  static constexpr Kind kKind = Kind::kOptionalTensor;
  static const View* get(const Value& value) { return value.view.present ? &value.view : nullptr; }
};

template <>
struct Binding<int64_t> {
  static constexpr Kind kKind = Kind::kInteger;
  static int64_t get(const Value& value) { return value.integer; }
};

template <>
struct Binding<double> {
  static constexpr Kind kKind = Kind::kNumber;
  static double get(const Value& value) { return value.number; }
};

template <>
struct Binding<bool> {
  static constexpr Kind kKind = Kind::kFlag;
  static bool get(const Value& value) { return value.flag; }
};

struct Op {
  using Function = void (*)();
  using Invoke = void (*)(Function, const Value*);

  Schema schema;
  Function function;
  Invoke invoke;
};

// Run an op on arguments that match its schema: the one entry behind both doors. Throws
// std::runtime_error with a message that starts with the op's name.
void run(const Op& op, const Value* values);

class Module {
 public:
  template <class... Parameters>
  void def(const char* schema, void (*function)(Parameters...)) {
    add(schema, {Binding<Parameters>::kKind...}, reinterpret_cast<Op::Function>(function),
        [](Op::Function erased, const Value* values) {
          call(reinterpret_cast<void (*)(Parameters...)>(erased), values,
               std::index_sequence_for<Parameters...>{});
        });
  }

 private:
  template <class... Parameters, size_t... I>
  static void call(void (*function)(Parameters...), const Value* values,
                   std::index_sequence<I...>) {
    function(Binding<Parameters>::get(values[I])...);
  }

  static void add(const char* schema, const std::vector<Kind>& parameters, Op::Function function,
                  Op::Invoke invoke);
};

// Every op of every OPWEAVE_EXTENSION_MODULE; the first call collects them, and may throw
// std::invalid_argument for a bad registration.
const std::vector<Op>& all_ops();

// The same ops for the call path: set by all_ops(), null before.
extern const Op* op_table;

struct ModuleRegistration {
  explicit ModuleRegistration(void (*define)(Module&));
};

}  // namespace opweave

#define OPWEAVE_CONCAT_(a, b) a##b
#define OPWEAVE_CONCAT(a, b) OPWEAVE_CONCAT_(a, b)
#define OPWEAVE_EXTENSION_MODULE(m)                                                        \
  static void OPWEAVE_CONCAT(opweave_define_, __LINE__)(::opweave::Module&);                \
  static const ::opweave::ModuleRegistration OPWEAVE_CONCAT(opweave_registration_, __LINE__)( \
      OPWEAVE_CONCAT(opweave_define_, __LINE__));                                          \
  static void OPWEAVE_CONCAT(opweave_define_, __LINE__)([[maybe_unused]] ::opweave::Module & m)
