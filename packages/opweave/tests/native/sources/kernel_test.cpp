// Compares kernels with scalar definitions in double precision, without torch or Python, so that it
// runs under an emulator; see make test-aarch64. Prints one line per kernel and type.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/activation.h"
#include "kernels/kernels.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/quant.h"
#include "kernels/rotary.h"

namespace {

using Values = std::vector<double>;
using Bytes = std::vector<char>;

std::mt19937 generator(20);
int failures = 0;

struct Type {
  const char* name;
  OpweaveDtype dtype;
  int64_t size;
  int mantissa;      // explicit bits
  int least_exponent;  // of a normal number
};

const Type kFloat32 = {"float32", OPWEAVE_FLOAT32, 4, 23, -126};
const Type kTypes[] = {
    kFloat32,
    {"bfloat16", OPWEAVE_BFLOAT16, 2, 7, -126},
    {"float16", OPWEAVE_FLOAT16, 2, 10, -14},
};

// Round to nearest even.
double rounded(double x, int mantissa, int least_exponent) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), least_exponent);
  return std::ldexp(std::nearbyint(std::ldexp(x, mantissa - exponent)), exponent - mantissa);
}

double rounded(double x, const Type& type) {
  return rounded(x, type.mantissa, type.least_exponent);
}

// The unit in the last place of x.
double unit(double x, const Type& type) {
  const int exponent = x == 0 ? type.least_exponent : std::max(std::ilogb(x), type.least_exponent);
  return std::ldexp(1, exponent - type.mantissa);
}

void write(char* to, double x, const Type& type) {
  const float value = static_cast<float>(x);  // exact: x is a number of the type
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (type.dtype == OPWEAVE_FLOAT32) {
    std::memcpy(to, &bits, sizeof(bits));
    return;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);
  if (type.dtype == OPWEAVE_FLOAT16) {
    const double magnitude = std::fabs(x);
    const int exponent = magnitude == 0 ? -15 : std::max(std::ilogb(magnitude), -15);
    const double fraction = exponent < -14 ? std::ldexp(magnitude, 24)
                                           : std::ldexp(magnitude, 10 - exponent) - 1024;
    half = static_cast<uint16_t>((std::signbit(x) ? 0x8000 : 0) + ((exponent + 15) << 10) +
                                 static_cast<int>(fraction));
  }
  std::memcpy(to, &half, sizeof(half));
}

double read(const char* from, const Type& type) {
  if (type.dtype == OPWEAVE_FLOAT32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  if (type.dtype == OPWEAVE_BFLOAT16) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  const int exponent = half >> 10 & 31;
  const int fraction = half & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24)
                           : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                            : std::ldexp(1024 + fraction, exponent - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

Values random_values(int64_t count, const Type& type, double scale = 1) {
  std::normal_distribution<double> normal(0, scale);
  Values values(static_cast<size_t>(count));
  for (double& value : values) value = rounded(normal(generator), type);
  return values;
}

Bytes bytes_of(const Values& values, const Type& type) {
  Bytes bytes(values.size() * static_cast<size_t>(type.size));
  for (size_t i = 0; i < values.size(); ++i) {
    write(bytes.data() + i * static_cast<size_t>(type.size), values[i], type);
  }
  return bytes;
}

OpweaveRows rows_of(int64_t count, int64_t out_bytes, int64_t x_bytes) {
  OpweaveRows rows = {};
  rows.count = count;
  rows.rank = 1;
  rows.sizes[0] = count;
  rows.byte_strides[0][0] = out_bytes;
  rows.byte_strides[1][0] = x_bytes;
  return rows;
}

// Each result must be within `units` units in the last place of the type, plus `absolute`.
void compare(const std::string& name, const Type& type, const Bytes& found, const Values& expected,
             double units, double absolute = 0) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double value = read(found.data() + i * static_cast<size_t>(type.size), type);
    const double error = std::fabs(value - expected[i]);
    const double allowed = units * unit(expected[i], type) + absolute;
    worst = std::max(worst, std::isnan(error) ? INFINITY : error / allowed);
  }
  const bool passes = worst <= 1 && !expected.empty();
  failures += passes ? 0 : 1;
  std::printf("%-6s %-18s %-8s %6zu results, largest error %.2f of the tolerance\n",
              passes ? "ok" : "FAILED", name.c_str(), type.name, expected.size(), worst);
}

const int64_t kWidths[] = {1, 3, 8, 67, 1024};
constexpr int64_t kTokens = 5;

void test_rms_norm(const OpweaveKernels& kernels, const Type& type) {
  for (const int64_t width : kWidths) {
    const Values x = random_values(kTokens * width, type);
    const Values weight = random_values(width, type);
    const Bytes x_bytes = bytes_of(x, type);
    const Bytes weight_bytes = bytes_of(weight, type);
    Bytes out(x_bytes.size());
    OpweaveRmsNorm call = {out.data(), x_bytes.data(), weight_bytes.data(),
                           rows_of(kTokens, width * type.size, width * type.size),
                           width, 1e-6f, type.dtype, type.dtype};
    kernels.norm->rms_norm(0, kTokens, &call);
    Values expected;
    for (int64_t t = 0; t < kTokens; ++t) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i) squares += x[t * width + i] * x[t * width + i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-6);
      for (int64_t i = 0; i < width; ++i) {
        expected.push_back(rounded(x[t * width + i] * scale, type) * weight[i]);
      }
    }
    // A sum that is rounded differently may change the rounding before the weight.
    compare("rms_norm", type, out, expected, type.size == 4 ? 8 : 2.6);
  }
}

void test_silu_and_mul(const OpweaveKernels& kernels, const Type& type) {
  for (const int64_t width : kWidths) {
    const Values x = random_values(kTokens * 2 * width, type, 3);
    const Bytes x_bytes = bytes_of(x, type);
    Bytes out(x_bytes.size() / 2);
    OpweaveActivation call = {};
    call.out = out.data();
    call.x = x_bytes.data();
    call.rows = rows_of(kTokens, width * type.size, 2 * width * type.size);
    call.width = width;
    call.dtype = type.dtype;
    kernels.activation->silu_and_mul(0, kTokens, &call);
    Values expected;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t i = 0; i < width; ++i) {
        const double gate = x[t * 2 * width + i];
        expected.push_back(rounded(gate / (1 + std::exp(-gate)), type) *
                           x[t * 2 * width + width + i]);
      }
    }
    compare("silu_and_mul", type, out, expected, type.size == 4 ? 8 : 2.6);
  }
}

void test_linear(const OpweaveKernels& kernels, const Type& type) {
  for (const int64_t width : kWidths) {
    constexpr int64_t kFeatures = 37;
    const Values x = random_values(kTokens * width, type);
    const Values weight = random_values(kFeatures * width, type);
    const Values bias = random_values(kFeatures, type);
    const Bytes x_bytes = bytes_of(x, type);
    const Bytes weight_bytes = bytes_of(weight, type);
    const Bytes bias_bytes = bytes_of(bias, type);
    Bytes out(static_cast<size_t>(kTokens * kFeatures * type.size));
    const int64_t stride = (width * 4 / OPWEAVE_LINEAR_ALIGNMENT + 5) * OPWEAVE_LINEAR_ALIGNMENT;
    std::vector<char> kept(static_cast<size_t>((kTokens + 1) * stride));
    char* aligned = kept.data() + OPWEAVE_LINEAR_ALIGNMENT -
                    reinterpret_cast<uintptr_t>(kept.data()) % OPWEAVE_LINEAR_ALIGNMENT;
    OpweaveLinearTokens tokens = {aligned, x_bytes.data(),
                                  rows_of(kTokens, kFeatures * type.size, width * type.size),
                                  width, stride, type.dtype, type.dtype};
    kernels.linear->keep(0, kTokens, &tokens);
    OpweaveLinear call = {};
    call.out = out.data();
    call.x = aligned;
    call.weight = weight_bytes.data();
    call.bias = bias_bytes.data();
    call.tokens = kTokens;
    call.width = width;
    call.out_features = kFeatures;
    call.x_stride = stride;
    call.weight_stride = width;
    call.dtype = call.weight_dtype = call.bias_dtype = type.dtype;
    kernels.linear->linear(0, kFeatures, &call);
    Values expected;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t n = 0; n < kFeatures; ++n) {
        double sum = 0;
        for (int64_t i = 0; i < width; ++i) sum += x[t * width + i] * weight[n * width + i];
        expected.push_back(sum + bias[n]);
      }
    }
    compare("linear", type, out, expected, 0.51, 1e-6 * static_cast<double>(width));
  }
}

void test_rotary(const OpweaveKernels& kernels, const Type& type) {
  constexpr int64_t kHeads = 3, kSize = 24, kRotary = 16, kPositions = 11;
  for (const bool is_neox : {true, false}) {
    const Values x = random_values(kTokens * kHeads * kSize, type);
    const Values cache = random_values(kPositions * kRotary, type, 0.5);
    const int64_t positions[kTokens] = {0, 10, 4, 4, 7};
    const Bytes x_bytes = bytes_of(x, type);
    const Bytes cache_bytes = bytes_of(cache, type);
    Bytes out(x_bytes.size());
    OpweaveRotary call = {};
    const int64_t token_bytes = kHeads * kSize * type.size;
    call.query = {out.data(), x_bytes.data(), rows_of(kTokens, token_bytes, token_bytes), kHeads,
                  kSize * type.size, kSize * type.size, nullptr};
    call.key.tokens = rows_of(kTokens, 0, 0);
    call.positions = positions;
    call.cache = cache_bytes.data();
    call.cache_rows = kPositions;
    call.cache_stride = kRotary;
    call.head_size = kSize;
    call.rotary_size = kRotary;
    call.is_neox = is_neox ? 1 : 0;
    call.dtype = call.cache_dtype = type.dtype;
    call.positions_dtype = OPWEAVE_INT64;
    kernels.rotary->rotary_embedding(0, kTokens, &call);
    Values expected = x;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const int64_t head = (t * kHeads + h) * kSize;
        for (int64_t i = 0; i < kRotary / 2; ++i) {
          const double cosine = cache[positions[t] * kRotary + i];
          const double sine = cache[positions[t] * kRotary + kRotary / 2 + i];
          const int64_t first = head + (is_neox ? i : 2 * i);
          const int64_t second = head + (is_neox ? i + kRotary / 2 : 2 * i + 1);
          expected[first] = x[first] * cosine - x[second] * sine;
          expected[second] = x[second] * cosine + x[first] * sine;
        }
      }
    }
    compare(is_neox ? "rotary, neox" : "rotary, gpt-j", type, out, expected, 0.51, 4e-7);
  }
}

// The value of a float8_e4m3fn code.
double float8(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int fraction = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -9)
                                         : std::ldexp(8 + fraction, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Codes are compared exactly, except for ties that float32 decides by the rounding of the quotient.
void test_static_quant(const OpweaveKernels& kernels, const Type& type) {
  for (const bool is_int8 : {false, true}) {
    for (const int64_t width : kWidths) {
      const Values x = random_values(kTokens * width, type, 40);
      const Bytes x_bytes = bytes_of(x, type);
      std::vector<uint8_t> out(x.size());
      const float scale = 0.37f;
      OpweaveStaticQuant call = {out.data(), x_bytes.data(), &scale,
                                 rows_of(kTokens, width, width * type.size), width, kTokens, width,
                                 1, type.dtype, is_int8 ? OPWEAVE_INT8 : OPWEAVE_FLOAT8_E4M3FN};
      kernels.quant->static_quant(0, kTokens, &call);
      Bytes found;
      Values expected;
      const float inverse = 1 / scale;
      for (size_t i = 0; i < x.size(); ++i) {
        const double scaled = static_cast<float>(x[i]) * inverse;
        const double bound = is_int8 ? 128 : 448;
        const double value = std::min(std::max(scaled, -bound), is_int8 ? bound - 1 : bound);
        expected.push_back(is_int8 ? std::nearbyint(value) : rounded(value, 3, -6));
        const double result = is_int8 ? static_cast<int8_t>(out[i]) : float8(out[i]);
        found.resize(found.size() + 4);
        write(found.data() + 4 * i, result, kFloat32);
      }
      compare(is_int8 ? "static_quant int8" : "static_quant fp8", kFloat32, found, expected, 0,
              1e-30);
    }
  }
}

}  // namespace

int main() {
  const OpweaveKernels* kernels = opweave_kernels();
  if (kernels == nullptr) {
    std::printf("FAILED %s\n", opweave_isa_error());
    return 1;
  }
  std::printf("instruction set: %s\n", kernels->isa);
  for (const Type& type : kTypes) {
    test_rms_norm(*kernels, type);
    test_silu_and_mul(*kernels, type);
    test_linear(*kernels, type);
    test_rotary(*kernels, type);
    test_static_quant(*kernels, type);
  }
  std::printf("%d failed\n", failures);
  return failures == 0 ? 0 : 1;
}
