#include "inference/sample/candidates.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "inference/sample/draw.h"

namespace unshard::inference {
namespace {

/// Below this many a sort is cheaper than one more pass.
constexpr std::int64_t kSortAtMost = 256;
/// Halvings of the bracket before what is left in it is sorted, however much it is (logits of very different sizes).
constexpr int kHalvings = 24;
constexpr float kLowest = std::numeric_limits<float>::lowest(), kAbove = std::numeric_limits<float>::infinity();

}  // namespace

Candidates::Candidates(const SampleKernels& kernels, std::int64_t vocab)
    : kernels_(kernels),
      ids_(static_cast<std::size_t>(vocab + 16)),
      values_(static_cast<std::size_t>(vocab + 16)),
      weights_(static_cast<std::size_t>(vocab + 16)),
      middle_(static_cast<std::size_t>(vocab + 16)),
      order_(static_cast<std::size_t>(vocab + 16)) {}

Candidates::Item Candidates::item(std::int64_t i) const {
  const auto at = static_cast<std::size_t>(i);
  return {values_[at], ids_[at], weights_[at]};
}

void Candidates::put(std::int64_t i, const Item& item) {
  const auto at = static_cast<std::size_t>(i);
  values_[at] = item.value;
  ids_[at] = item.id;
  weights_[at] = item.weight;
}

void Candidates::gather(const float* x, std::int64_t n, const float* maxima, float threshold, float largest, float scale) {
  largest_ = largest;
  count_ = kernels_.gather(x, n, maxima, std::max(threshold, kLowest), kAbove, ids_.data(), values_.data());
  if (scale != 0) kernels_.exps(values_.data(), count_, largest, scale, weights_.data());
}

/// The k-th largest of the lanes' maxima is a lower bound of the k-th largest element: k lanes have an element that is at least as large.
void Candidates::gather_best(const float* x, std::int64_t n, const float* maxima, std::int64_t k, float largest, float scale) {
  const std::int64_t lanes = sample_chunks(n) * kSampleLanes;
  float threshold = kLowest;
  if (k <= lanes) {
    std::copy_n(maxima, lanes, order_.begin());
    std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.begin() + lanes, std::greater<>());
    threshold = order_[static_cast<std::size_t>(k - 1)];
  }
  gather(x, n, maxima, threshold, largest, scale);
}

/// Find where the best end, without sorting: bracket the logit at which they do, then halve the bracket, one pass each, until few are left
/// in it. \param reached  of Above: have these reached the target?
/// \return false: all together don't
template <class Reached>
bool Candidates::bracket(Reached reached, Bracket& b) const {
  const auto above = [&](float logit) { return kernels_.above(values_.data(), weights_.data(), count_, logit); };
  for (float width = 1;; width *= 2) {
    const float edge = largest_ - width;
    const Above found = above(edge);
    if (reached(found)) {
      b.low = edge;
      b.at_low = found.count;
      break;
    }
    if (found.count == count_) return false;
    b.high = edge;
    b.sure = found;
  }
  for (int i = 0; i < kHalvings && b.at_low - b.sure.count > kSortAtMost; ++i) {
    const float middle = b.low / 2 + b.high / 2;
    if (!(middle > b.low && middle < b.high)) break;
    const Above found = above(middle);
    if (reached(found)) {
      b.low = middle;
      b.at_low = found.count;
    } else {
      b.high = middle;
      b.sure = found;
    }
  }
  return true;
}

/// What is above the bracket stays in order of ids; behind it comes what is in it, sorted, up to the end.
template <class Reached>
void Candidates::keep_best(Reached reached) {
  Bracket b;
  if (count_ > kSortAtMost && !bracket(reached, b)) return;
  const std::int64_t inside =
      kernels_.gather(values_.data(), count_, nullptr, std::max(b.low, kLowest), b.high, middle_.data(), order_.data());
  items_.clear();
  for (std::int64_t i = 0; i < inside; ++i) items_.push_back(item(middle_[static_cast<std::size_t>(i)]));
  std::int64_t kept = kernels_.compact(ids_.data(), values_.data(), weights_.data(), count_, b.high);
  std::sort(items_.begin(), items_.end(), better);
  Above best = b.sure;
  for (const Item& next : items_) {
    put(kept++, next);
    best.mass += next.weight;
    ++best.count;
    if (reached(best)) break;
  }
  count_ = kept;
}

void Candidates::keep_count(std::int64_t k) {
  if (k < count_) keep_best([k](const Above& above) { return above.count >= k; });
}

void Candidates::keep_mass(double mass) {
  keep_best([mass](const Above& above) { return above.count > 0 && above.mass >= mass; });
}

void Candidates::keep_at_least(float threshold) {
  count_ = kernels_.compact(ids_.data(), values_.data(), weights_.data(), count_, threshold);
}

void Candidates::sort() {
  items_.clear();
  for (std::int64_t i = 0; i < count_; ++i) items_.push_back(item(i));
  std::sort(items_.begin(), items_.end(), better);
  for (std::int64_t i = 0; i < count_; ++i) put(i, items_[static_cast<std::size_t>(i)]);
}

double Candidates::mass() const { return kernels_.above(values_.data(), weights_.data(), count_, kLowest).mass; }

std::int32_t Candidates::draw(double u) {
  sums_.clear();
  for (std::int64_t begin = 0; begin < count_; begin += kSampleChunk) {
    const std::int64_t n = std::min(kSampleChunk, count_ - begin);
    sums_.push_back(kernels_.above(values_.data() + begin, weights_.data() + begin, n, kLowest).mass);
  }
  const auto [chunk, share] = pick_chunk(sums_, u);
  const auto begin = static_cast<std::int64_t>(chunk) * kSampleChunk, n = std::min(kSampleChunk, count_ - begin);
  const auto at = pick_element(std::span(weights_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n)), share);
  return id(begin + static_cast<std::int64_t>(at));
}

}  // namespace unshard::inference
