// Operators that break the rules on purpose. Only a build with OPWEAVE_SANITIZE has them.
#include <climits>

#include "kernels/norm.h"
#include "module/module.h"

namespace opweave {
namespace {

// Lets the rms_norm kernel read and write `width` elements, however many there are.
void misuse_width(const View& out, const View& x, int64_t width) {
  OpweaveRmsNorm call;
  call.out = out.data;
  call.x = x.data;
  call.weight = nullptr;
  call.rows = rows_of(out, x);
  call.width = width;
  call.epsilon = 1e-6F;
  call.dtype = x.dtype;
  call.weight_dtype = x.dtype;
  active_kernels().norm->rms_norm(0, 1, &call);
}

int64_t misuse_signed(const View& x, int64_t number) { return number + x.sizes[0]; }

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def("misuse_width(Tensor(a!) out, Tensor x, int width) -> ()", opweave::misuse_width);
  m.def("misuse_signed(Tensor x, int number) -> int", opweave::misuse_signed);
}
