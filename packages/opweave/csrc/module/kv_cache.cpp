// reshape_and_cache: argument checks, then the copy.
#include "module/cache_write.h"
#include "module/module.h"

namespace opweave {
namespace {

void reshape_and_cache(const View& key, const View& value, const View& key_cache,
                       const View& value_cache, const View& slot_mapping) {
  OpweaveReshapeAndCache call = cache_write(key, value, key_cache, value_cache, slot_mapping);
  const int64_t elements = key.sizes[1] * (key.sizes[2] + value.sizes[2]);
  for_rows(slot_mapping.sizes[0], elements, opweave_reshape_and_cache, &call);
}

}  // namespace
}  // namespace opweave

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping) -> ()",
      opweave::reshape_and_cache);
}
