#include "threads.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tandem {
namespace {

// How long a thread looks for the next job before it sleeps: about 20 microseconds, the gap between two jobs of a step.
constexpr int kSpins = 400;
constexpr int kNumSlots = 2;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  TileFunction function = nullptr;
  void* context = nullptr;
  int num_tiles = 0;
};

}  // namespace

// ticket: number of the job in the upper half, how many of its tiles are left in the lower. A thread that comes late takes
// from whatever job runs by then, and it reads the job's slot only when it holds a tile: the job cannot end before that.
struct Team::State {
  std::atomic<uint64_t> ticket{0};
  std::atomic<uint32_t> job_number{0};
  std::atomic<int> num_done{0};
  std::atomic<bool> is_closing{false};
  Job jobs[kNumSlots];
  std::vector<std::thread> threads;
  const pid_t owner = getpid();

  void work(int thread) {
    uint64_t now = ticket.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(now) != 0) {
      if (!ticket.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      const Job& job = jobs[(now >> 32) % kNumSlots];
      job.function(job.context, job.num_tiles - static_cast<int>(static_cast<uint32_t>(now)), thread);
      num_done.fetch_add(1, std::memory_order_release);
      now = ticket.load(std::memory_order_acquire);
    }
  }

  void live(int thread) {
    uint32_t seen = 0;
    for (;;) {
      uint32_t number = job_number.load(std::memory_order_acquire);
      for (int i = 0; i < kSpins && number == seen; ++i) {
        pause();
        number = job_number.load(std::memory_order_acquire);
      }
      if (number == seen) job_number.wait(seen, std::memory_order_acquire);
      if (is_closing.load(std::memory_order_acquire)) return;
      seen = job_number.load(std::memory_order_acquire);
      work(thread);
    }
  }
};

Team::Team(int num_threads) : state_(nullptr) {
  if (num_threads < 1) throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + ", must be at least 1");
  state_ = new State;
  for (int i = 1; i < num_threads; ++i) state_->threads.emplace_back([state = state_, i] { state->live(i); });
}

Team::~Team() {
  if (getpid() != state_->owner) return;  // a fork's child has no such threads; their state is left to the system
  state_->is_closing.store(true, std::memory_order_release);
  state_->job_number.fetch_add(1, std::memory_order_release);
  state_->job_number.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

int Team::num_threads() const { return static_cast<int>(state_->threads.size()) + 1; }

void Team::run(int num_tiles, TileFunction function, void* context) {
  if (num_tiles <= 0) return;
  if (state_->threads.empty() || num_tiles == 1) {
    for (int tile = 0; tile < num_tiles; ++tile) function(context, tile, 0);
    return;
  }
  State& s = *state_;
  const uint32_t number = s.job_number.load(std::memory_order_relaxed) + 1;
  s.jobs[number % kNumSlots] = Job{function, context, num_tiles};
  s.num_done.store(0, std::memory_order_relaxed);
  s.ticket.store(static_cast<uint64_t>(number) << 32 | static_cast<uint32_t>(num_tiles), std::memory_order_release);
  s.job_number.store(number, std::memory_order_release);
  s.job_number.notify_all();
  s.work(0);
  for (int spins = 0; s.num_done.load(std::memory_order_acquire) < num_tiles; ++spins) {
    pause();
    if (spins > kSpins) sched_yield();  // the thread with the last tile may want this very core
  }
}

}  // namespace tandem
