#include "rows.hpp"

#include <cmath>

namespace tessera {

namespace {

// Rows of one piece, so that a piece is worth handing over: about 16,384 elements.
int rows_of_piece(int size) { return size >= 16384 ? 1 : 16384 / size; }

template <typename Work>
void by_rows(Team& team, int rows, int size, const Work& work) {
  const int each = rows_of_piece(size);
  team.run((rows + each - 1) / each, [&](int piece) {
    for (int row = piece * each; row < rows && row < (piece + 1) * each; ++row) work(row);
  });
}

}  // namespace

namespace {

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
  for (int each = 0; each < size; ++each) to[each] = from[each] * scale * weight[each];
}

}  // namespace

void norm_heads(Team& team, float* x, std::ptrdiff_t stride, const float* weight, float eps, int rows, int heads, int size) {
  by_rows(team, rows, heads * size, [&](int row) {
    float* head = x + row * stride;
    for (int each = 0; each < heads; ++each) normalise(head + each * size, weight, eps, head + each * size, size);
  });
}

void rms_norm(Team& team, const float* x, const float* residual, float* total, const float* weight, float eps, float* y, int rows, int size) {
  by_rows(team, rows, size, [&](int row) {
    const std::ptrdiff_t first = std::ptrdiff_t{row} * size;
    const float* from = x + first;
    float* to = y + first;
    if (residual) {
      for (int at = 0; at < size; ++at) total[first + at] = residual[first + at] + from[at];
      from = total + first;
    }
    normalise(from, weight, eps, to, size);
  });
}

void silu_and_mul(Team& team, const float* x, float* y, int rows, int n) {
  by_rows(team, rows, n, [&](int row) {
    const float* gate = x + std::ptrdiff_t{row} * 2 * n;
    float* to = y + std::ptrdiff_t{row} * n;
    for (int at = 0; at < n; at += WIDTH) {
      float gates[WIDTH] = {}, ups[WIDTH] = {}, result[WIDTH];
      const int count = n - at < WIDTH ? n - at : WIDTH;
      std::memcpy(gates, gate + at, count * sizeof(float));
      std::memcpy(ups, gate + n + at, count * sizeof(float));
      const Vec value = load(gates);
      store(result, value / (1.0f + exponential(-value)) * load(ups));
      std::memcpy(to + at, result, count * sizeof(float));
    }
  });
}

}  // namespace tessera
