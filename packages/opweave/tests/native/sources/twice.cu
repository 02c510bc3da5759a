// An op for both kinds of device in one CUDA source.
#include <cuda_runtime.h>
#include <opweave/extension.h>

using namespace opweave;

namespace {

constexpr int kThreads = 256;
constexpr const char* kSchema = "twice(Tensor(a!) out, Tensor x) -> ()";

void check_arguments(const View& out, const View& x) {
  check_dtype(x, {OPWEAVE_FLOAT32});
  check_same_dtype(out, x);
  check_same_sizes(out, x);
  check_contiguous(x);
  check_contiguous(out);
}

__global__ void twice_kernel(float* out, const float* x, int64_t count) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) out[i] = 2 * x[i];
}

void twice_on_cuda(const View& out, const View& x) {
  check_arguments(out, x);
  const int64_t count = x.element_count();
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  twice_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(current_stream(x))>>>(
      reinterpret_cast<float*>(out.data), reinterpret_cast<const float*>(x.data), count);
  check(cudaGetLastError() == cudaSuccess, "the kernel could not be launched");
}

void twice_on_cpu(const View& out, const View& x) {
  check_arguments(out, x);
  auto* to = reinterpret_cast<float*>(out.data);
  const auto* from = reinterpret_cast<const float*>(x.data);
  for (int64_t i = 0; i < x.element_count(); ++i) to[i] = 2 * from[i];
}

}  // namespace

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(kSchema, twice_on_cpu);
  m.def_cuda(kSchema, twice_on_cuda);
}
