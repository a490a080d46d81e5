#include "memory.h"

#include <sys/mman.h>

#include <mutex>
#include <new>

namespace tandem {
namespace {

constexpr int64_t kLine = 64, kPage = 4096, kHugePage = 2 << 20, kChunk = 64 << 20;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Whole huge pages. Nothing is backed before it is touched, so a chunk that is partly used costs no more than that.
class Chunk {
 public:
  explicit Chunk(int64_t num_bytes) : mapped_bytes_(num_bytes + kHugePage) {
    mapped_ = mmap(nullptr, static_cast<size_t>(mapped_bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    begin_ = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(mapped_), kHugePage));
    advise_huge_pages(begin_, num_bytes);
  }
  ~Chunk() { munmap(mapped_, static_cast<size_t>(mapped_bytes_)); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  char* begin() const { return begin_; }

 private:
  void* mapped_;
  int64_t mapped_bytes_;
  char* begin_;
};

std::mutex mutex;
std::weak_ptr<Chunk> open_chunk;  // where the next piece goes if it fits
int64_t used_bytes = 0;

}  // namespace

Memory::Memory(int64_t num_bytes) {
  if (num_bytes <= 0) return;
  size_ = round_up(num_bytes, kLine);
  const std::lock_guard<std::mutex> one_at_a_time(mutex);
  std::shared_ptr<Chunk> chunk = open_chunk.lock();
  if (chunk == nullptr || used_bytes + size_ > kChunk) {
    chunk = std::make_shared<Chunk>(round_up(size_ > kChunk ? size_ : kChunk, kHugePage));
    open_chunk = chunk;
    used_bytes = 0;
  }
  data_ = chunk->begin() + used_bytes;
  used_bytes += size_;
  chunk_ = chunk;
}

void advise_huge_pages(void* data, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  const int64_t first = round_up(reinterpret_cast<int64_t>(data), kPage);
  const int64_t last = (reinterpret_cast<int64_t>(data) + num_bytes) / kPage * kPage;
  if (last > first) madvise(reinterpret_cast<void*>(first), static_cast<size_t>(last - first), MADV_HUGEPAGE);
#else
  (void)data, (void)num_bytes;
#endif
}

}  // namespace tandem
