#include <cstdlib>
#include <new>

#include "kernels.h"
#include "memory.h"

namespace tandem {
namespace {

constexpr int64_t kHugePage = 2 << 20;

}  // namespace

Workspace::~Workspace() {
  for (void* data : data_) std::free(data);
}

void* Workspace::take(int slot, int64_t num_bytes) {
  if (num_bytes <= size_[slot]) return data_[slot];
  // Half as much again, so that a step that grows by a row each time does not allocate each time.
  int64_t size = (num_bytes + num_bytes / 2 + 63) / 64 * 64;
  const int64_t alignment = size >= kHugePage ? kHugePage : 64;
  size = (size + alignment - 1) / alignment * alignment;
  std::free(data_[slot]);
  size_[slot] = 0;
  data_[slot] = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(size));
  if (data_[slot] == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) advise_huge_pages(data_[slot], size);
  size_[slot] = size;
  return data_[slot];
}

}  // namespace tandem
