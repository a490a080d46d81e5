// Memory for weights, side by side on huge pages: reading from those is a third faster than from small pages.
#pragma once

#include <cstdint>
#include <memory>

namespace tandem {

// Zeroed, aligned to a cache line. Several pieces share a chunk, which goes back to the system with the last of them.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t num_bytes);  // raises std::bad_alloc

  void* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::shared_ptr<void> chunk_;
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// Asks for huge pages under memory that somebody else took; what refuses it serves small pages.
void advise_huge_pages(void* data, int64_t num_bytes);

}  // namespace tandem
