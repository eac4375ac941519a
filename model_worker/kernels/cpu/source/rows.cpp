#include "rows.hpp"

#include <cmath>

namespace tessera {

void normalise(const float* from, const float* weight, float eps, float* to, int size) {
  Vec squares{};
  int at = 0;
  for (; at + WIDTH <= size; at += WIDTH) {
    const Vec value = load(from + at);
    squares += value * value;
  }
  float square = sum(squares);
  for (; at < size; ++at) square += from[at] * from[at];
  const float scale = 1.0f / std::sqrt(square / static_cast<float>(size) + eps);
  for (at = 0; at + WIDTH <= size; at += WIDTH) store(to + at, load(from + at) * scale * load(weight + at));
  for (; at < size; ++at) to[at] = from[at] * scale * weight[at];
}

namespace {

inline Vec silu_times(Vec gate, Vec up) { return gate / (1.0f + exponential(-gate)) * up; }

}  // namespace

void silu_and_mul(const float* from, float* to, int n) {
  int at = 0;
  for (; at + WIDTH <= n; at += WIDTH) store(to + at, silu_times(load(from + at), load(from + n + at)));
  if (at == n) return;
  float gates[WIDTH] = {}, ups[WIDTH] = {}, results[WIDTH];
  std::copy(from + at, from + n, gates);
  std::copy(from + n + at, from + 2 * n, ups);
  store(results, silu_times(load(gates), load(ups)));
  std::copy(results, results + (n - at), to + at);
}

}  // namespace tessera
