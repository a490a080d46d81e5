// A team of threads that take tiles of one job after the other; whoever is slowed by another process takes fewer.
#pragma once

#include <cstdint>

namespace tandem {

using TileFunction = void (*)(void* context, int tile, int thread);

class Team {
 public:
  // num_threads: the caller included. Raises std::invalid_argument below 1.
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int num_threads() const;

  // Runs function(context, tile, thread) for tiles 0 .. num_tiles - 1 and returns when all are done. A thread that has
  // not woken up by then is not waited for. One job at a time.
  void run(int num_tiles, TileFunction function, void* context);

 private:
  struct State;
  State* state_;
};

}  // namespace tandem
