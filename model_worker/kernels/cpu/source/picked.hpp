// Some tokens of a batch.
#pragma once

#include <vector>

#include "attention.hpp"

namespace tessera {

// A batch of their own, in which each is a row. The pool has their keys and values.
class Picked {
 public:
  Picked(const BatchView& batch, const int64_t* tokens, int count) : tokens_(tokens), count_(count) {
    for (int at = 0; at < count; ++at) {
      const int token = static_cast<int>(tokens[at]), row = batch.row_of(token);
      const int32_t* table = batch.table(row);
      context_lens_.push_back(batch.seen_by(row, token));
      tables_.insert(tables_.end(), table, table + batch.table_stride);
    }
    for (int at = 0; at <= count; ++at) starts_.push_back(at);
    view_ = {nullptr, starts_.data(), context_lens_.data(), tables_.data(), count, count, batch.table_stride};
  }

  const BatchView& view() const { return view_; }

  // Their rows of `from` [tokens of the batch, size].
  std::vector<float> rows(const float* from, int size) const {
    std::vector<float> to;
    to.reserve(std::size_t(count_) * size);
    for (int at = 0; at < count_; ++at) to.insert(to.end(), from + tokens_[at] * size, from + (tokens_[at] + 1) * size);
    return to;
  }

 private:
  const int64_t* tokens_;
  int count_;
  std::vector<int32_t> starts_, context_lens_, tables_;
  BatchView view_;
};

}  // namespace tessera
