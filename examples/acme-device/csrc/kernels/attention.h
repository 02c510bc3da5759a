// Softmax attention of one query head over the keys of its sequence, wherever they lie.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "rows.h"

namespace acme::kernels {

struct Scores {
  float scale;
  float soft_cap;  // 0: none
};

// Attends with `query` to keys first, ..., last - 1 and writes the average of their values.
// `key_of(k)` and `value_of(k)` return the row of key k; without keys the result is zero.
template <class T, class Key, class Value>
void attend(T* out, const T* query, Key key_of, Value value_of, std::int64_t first,
            std::int64_t last, std::int64_t head_size, std::int64_t value_size, Scores how,
            std::vector<float>& scratch) {
  const std::int64_t keys = std::max<std::int64_t>(last - first, 0);
  scratch.assign(keys + value_size, 0.0f);
  float* const scores = scratch.data();
  float* const sums = scores + keys;
  float highest = -INFINITY;
  for (std::int64_t k = 0; k < keys; ++k) {
    float score = dot(query, key_of(first + k), head_size) * how.scale;
    if (how.soft_cap > 0) score = how.soft_cap * std::tanh(score / how.soft_cap);
    scores[k] = score;
    highest = std::max(highest, score);
  }
  float total = 0.0f;
  for (std::int64_t k = 0; k < keys; ++k) {
    const float weight = std::exp(scores[k] - highest);
    total += weight;
    const T* const value = value_of(first + k);
    for (std::int64_t i = 0; i < value_size; ++i) sums[i] += weight * float(value[i]);
  }
  for (std::int64_t i = 0; i < value_size; ++i) out[i] = T(keys == 0 ? 0.0f : sums[i] / total);
}

}  // namespace acme::kernels
