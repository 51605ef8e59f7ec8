// Zeroed pages of this process, or of it and the children that it forks afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace mok::cli {

enum class Sharing { own, with_children };

class Memory {
 public:
  Memory() = default;
  // Throws out_of_memory.
  explicit Memory(int64_t bytes, Sharing sharing = Sharing::own);
  ~Memory();
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }  // null when there are no bytes
  int64_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

int64_t available_bytes();  // of this machine's memory, for this process (container limit too)
int usable_cores();

}  // namespace mok::cli
