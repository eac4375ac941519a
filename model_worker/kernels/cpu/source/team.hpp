// Threads that work on one thing at a time together with whoever asks them.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tessera {

// Pieces of a job are taken one by one, and nobody is waited for who has taken none: a thread that the system has set aside delays the others by one
// piece at most. Which thread does a piece changes nothing about what it computes. One caller at a time.
class Team {
 public:
  explicit Team(int threads);
  ~Team();
  int size() const { return static_cast<int>(members_.size()) + 1; }

  // Calls `work(piece)` for every piece of [0, pieces), and returns when all are done. At most 2^24 - 1 pieces.
  template <typename Work>
  void run(int pieces, const Work& work) {
    if (members_.empty() || pieces <= 1) {
      for (int piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    start(pieces, [](const void* context, int piece) { (*static_cast<const Work*>(context))(piece); }, &work);
  }

 private:
  using Call = void (*)(const void* context, int piece);

  void start(int pieces, Call call, const void* context);
  void take_pieces();
  void serve();

  Call call_ = nullptr;
  const void* context_ = nullptr;
  // How many pieces the present job has (from bit 24 on) and which is next, in one word: who takes a piece that there is knows that its job
  // cannot end before, so that `call_` and `context_` are this job's.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<unsigned> jobs_{0};  // counts up; the threads wait for it to change
  std::atomic<bool> is_over_{false};
  std::vector<std::thread> members_;
};

}  // namespace tessera
