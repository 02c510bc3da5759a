// The input and output rows of a call, in order.
#pragma once

#include "kernels/row_cursor.h"

namespace {

// Input rows of T (operand 1) and output rows of Out (operand 0), and the rows one or more rows
// ahead, for prefetching.
template <class T, class Out = T>
class Rows {
 public:
  Rows(const OpweaveRows& rows, void* out, const void* x, int64_t begin, int64_t ahead = 1)
      : out_(static_cast<char*>(out)),
        x_(static_cast<const char*>(x)),
        row_(rows, begin),
        next_(rows, begin + ahead) {}

  Out* out() const { return reinterpret_cast<Out*>(row_.in(out_, 0)); }
  const T* x() const { return reinterpret_cast<const T*>(row_.in(x_, 1)); }
  const Out* next_out() const { return reinterpret_cast<const Out*>(next_.in(out_, 0)); }
  const T* next_x() const { return reinterpret_cast<const T*>(next_.in(x_, 1)); }

  void advance() {
    row_.advance();
    next_.advance();
  }

 private:
  char* out_;
  const char* x_;
  RowCursor row_;
  RowCursor next_;
};

}  // namespace
