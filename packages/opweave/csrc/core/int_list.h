// Integer list arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace opweave {

// A borrowed list of integers, valid during the call.
class IntList {
 public:
  IntList() = default;
  IntList(const int64_t* data, size_t size) : data_(data), size_(size) {}

  const int64_t* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t operator[](size_t i) const { return data_[i]; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + size_; }

 private:
  const int64_t* data_;
  size_t size_;
};

// Storage for the lists of one call. Short lists are stored inline.
class IntStorage {
 public:
  int64_t* allocate(size_t count) {
    if (count <= kInline - used_) {
      int64_t* place = inline_ + used_;
      used_ += count;
      return place;
    }
    long_.reset(new Long{std::unique_ptr<int64_t[]>(new int64_t[count]), std::move(long_)});
    return long_->integers.get();
  }

 private:
  // A linked list: only one pointer to construct and destroy for calls without a list.
  struct Long {
    std::unique_ptr<int64_t[]> integers;
    std::unique_ptr<Long> others;
  };

  static constexpr size_t kInline = 32;
  int64_t inline_[kInline];  // not initialized on purpose: most calls do not have a list
  size_t used_ = 0;
  std::unique_ptr<Long> long_;
};

}  // namespace opweave
