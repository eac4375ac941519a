#include "team.hpp"

#include <immintrin.h>

namespace tessera {

namespace {

// Between two kernels of a pass lie some microseconds of Python; between two passes a millisecond and more, in which the cores are others'.
constexpr int SPINS = 2000;  // of 40 cycles or so each

constexpr uint64_t TURN = 1 << 19;  // ticks of the processor's clock: a fifth of a millisecond or so

constexpr uint64_t NEXT_BITS = 24;
constexpr uint64_t NEXT_MASK = (uint64_t{1} << NEXT_BITS) - 1;

// Gives whoever waits for this core a turn, now and then. Between two jobs a thread has no piece, so the team goes on without it; taken from it by the
// system the core goes in the middle of one, and all wait for that.
class Courtesy {
 public:
  void offer() {
    const uint64_t now = __rdtsc();
    if (now - last_ < TURN) return;
    std::this_thread::yield();
    last_ = __rdtsc();
  }

 private:
  uint64_t last_ = 0;
};

}  // namespace

Team::Team(int threads) {
  for (int member = 1; member < threads; ++member) members_.emplace_back([this] { serve(); });
}

Team::~Team() {
  is_over_.store(true);
  jobs_.fetch_add(1);
  jobs_.notify_all();
  for (std::thread& member : members_) member.join();
}

void Team::start(int pieces, Call call, const void* context) {
  call_ = call;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(pieces) << NEXT_BITS, std::memory_order_release);
  jobs_.fetch_add(1, std::memory_order_seq_cst);
  jobs_.notify_all();
  take_pieces();
  // Whoever has the last piece may have been set aside. Asleep we leave our core, and the system gives it to that thread; spinning we would not.
  int done = done_.load(std::memory_order_acquire);
  for (int spin = 0; done != pieces; ++spin, done = done_.load(std::memory_order_acquire)) {
    if (spin < SPINS) _mm_pause();
    else done_.wait(done, std::memory_order_acquire);
  }
}

void Team::take_pieces() {
  for (;;) {
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t piece = ticket & NEXT_MASK;
    const int pieces = static_cast<int>(ticket >> NEXT_BITS);
    if (static_cast<int>(piece) >= pieces) return;
    call_(context_, static_cast<int>(piece));
    if (done_.fetch_add(1, std::memory_order_release) + 1 == pieces) done_.notify_all();
  }
}

void Team::serve() {
  Courtesy courtesy;
  unsigned seen = 0;
  for (;;) {
    unsigned jobs = jobs_.load(std::memory_order_acquire);
    for (int spin = 0; jobs == seen && spin < SPINS; ++spin) {
      _mm_pause();
      jobs = jobs_.load(std::memory_order_acquire);
    }
    if (jobs == seen) {
      jobs_.wait(seen);
      continue;
    }
    seen = jobs;
    if (is_over_.load()) return;
    take_pieces();
    courtesy.offer();
  }
}

}  // namespace tessera
