// Registration of native ops: any number of files, one module.
//
//   OPWEAVE_EXTENSION_MODULE(m) {
//     m.def("scale(Tensor(a!) out, Tensor x, float factor) -> ()", scale);
//   }
//
// where `void scale(const View& out, const View& x, double factor)`. The schema determines the
// parameter types (see binding.h); loading the module fails if a function does not match its
// schema. A function for CUDA tensors is registered with m.def_cuda and the same schema.
#pragma once

#include <string>
#include <vector>

#include "binding.h"
#include "schema.h"
#include "view.h"

namespace opweave {

constexpr size_t kMaxArguments = 16;
constexpr size_t kMaxResults = 8;

// The function of an op for one device type.
struct Implementation {
  using Function = void (*)();
  using Invoke = void (*)(Function, const Value*, Scalar*);

  Function function = nullptr;
  Invoke invoke = nullptr;
};

struct Op {
  Schema schema;
  Implementation implementations[kDevices];

  const Implementation& on(Device device) const {
    return implementations[static_cast<int>(device)];
  }
  bool runs_on(Device device) const { return on(device).function != nullptr; }
};

// Run an op on arguments that match its schema. Both call paths use it. Throws std::runtime_error
// with a message that starts with the name of the op.
void run(const Op& op, const Value* values, Scalar* results);

class Module {
 public:
  template <class Result, class... Parameters>
  void def(const char* schema, Result (*function)(Parameters...)) {
    define(Device::kCpu, schema, function);
  }

  template <class Result, class... Parameters>
  void def_cuda(const char* schema, Result (*function)(Parameters...)) {
    define(Device::kCuda, schema, function);
  }

 private:
  struct Signature {
    std::vector<Type> parameters;
    std::vector<Kind> returns;
  };

  template <class Result, class... Parameters>
  static void define(Device device, const char* schema, Result (*function)(Parameters...)) {
    using Call = Caller<Result, Parameters...>;
    Implementation implementation;
    implementation.function = reinterpret_cast<Implementation::Function>(function);
    implementation.invoke = [](Implementation::Function erased, const Value* values,
                               Scalar* results) {
      Call::call(reinterpret_cast<Result (*)(Parameters...)>(erased), values, results);
    };
    add(device, schema, {{Binding<Parameters>::kType...}, Returns<Result>::kinds()},
        implementation);
  }

  static void add(Device device, const char* schema, const Signature& signature,
                  Implementation implementation);
};

// Return the ops of every OPWEAVE_EXTENSION_MODULE. The first call collects them, and throws
// std::invalid_argument for an invalid registration.
const std::vector<Op>& all_ops();

// The ops for the call paths: set by all_ops(), null before.
extern const Op* op_table;

struct ModuleRegistration {
  explicit ModuleRegistration(void (*define)(Module&));
};

}  // namespace opweave

#define OPWEAVE_CONCAT_(a, b) a##b
#define OPWEAVE_CONCAT(a, b) OPWEAVE_CONCAT_(a, b)
#define OPWEAVE_REGISTER_(define, registration, m)                 \
  static void define(::opweave::Module&);                          \
  static const ::opweave::ModuleRegistration registration(define); \
  static void define([[maybe_unused]] ::opweave::Module& m)
// Uses __COUNTER__, because __LINE__ may repeat in two files that one source includes.
#define OPWEAVE_NUMBERED_(number, m)                         \
  OPWEAVE_REGISTER_(OPWEAVE_CONCAT(opweave_define_, number), \
                    OPWEAVE_CONCAT(opweave_registration_, number), m)
#define OPWEAVE_EXTENSION_MODULE(m) OPWEAVE_NUMBERED_(__COUNTER__, m)
