// Rotary embedding's tables. Source: RoFormer (arXiv 2104.09864); Llama 3.1's scaling; YaRN (arXiv 2309.00071); LongRoPE (arXiv
// 2402.13753).
#include <algorithm>
#include <cmath>
#include <numbers>

#include "inference/model/model_config.h"

namespace unshard::inference {
namespace {

double llama3_frequency(const RopeConfig& rope, double frequency) {
  const double wavelength = 2 * std::numbers::pi / frequency, context = static_cast<double>(rope.original_context);
  if (wavelength < context / rope.high_factor) return frequency;
  if (wavelength > context / rope.low_factor) return frequency / rope.factor;
  const double smooth = (context / wavelength - rope.low_factor) / (rope.high_factor - rope.low_factor);
  return (1 - smooth) * frequency / rope.factor + smooth * frequency;
}

/// The feature that turns `rotations` times over the original context.
double yarn_feature(const RopeConfig& rope, double rotations) {
  return static_cast<double>(rope.rotary) * std::log(static_cast<double>(rope.original_context) / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(rope.theta));
}

double yarn_frequency(const RopeConfig& rope, double frequency, std::int64_t i) {
  double low = yarn_feature(rope, rope.beta_fast), high = yarn_feature(rope, rope.beta_slow);
  if (rope.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rope.rotary - 1));
  if (low == high) high += 0.001;
  const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
  return frequency / rope.factor * ramp + frequency * (1 - ramp);
}

double frequency_of(const RopeConfig& rope, std::int64_t i, bool beyond) {
  const double plain = 1.0 / std::pow(rope.theta, static_cast<double>(2 * i) / static_cast<double>(rope.rotary));
  switch (rope.kind) {
    case RopeKind::linear:
      return plain / rope.factor;
    case RopeKind::llama3:
      return llama3_frequency(rope, plain);
    case RopeKind::yarn:
      return yarn_frequency(rope, plain, i);
    case RopeKind::longrope:
      return plain / (beyond ? rope.long_factors : rope.short_factors).at(static_cast<std::size_t>(i));
    default:
      return plain;
  }
}

double yarn_scale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

double attention_factor_of(const RopeConfig& rope) {
  if (rope.attention_factor > 0) return rope.attention_factor;
  if (rope.kind == RopeKind::yarn) {
    if (rope.mscale > 0 && rope.mscale_all_dim > 0)
      return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim);
    return yarn_scale(rope.factor, 1);
  }
  if (rope.kind == RopeKind::longrope && rope.factor > 1)
    return std::sqrt(1 + std::log(rope.factor) / std::log(static_cast<double>(rope.original_context)));
  return 1;
}

}  // namespace

void rope_tables(const RopeConfig& rope, std::int64_t positions, std::int64_t context, std::vector<float>& cos, std::vector<float>& sin) {
  const std::int64_t half = rope.rotary / 2;
  const double factor = attention_factor_of(rope);
  cos.resize(static_cast<std::size_t>(positions * half));
  sin.resize(cos.size());
  for (std::int64_t i = 0; i < half; ++i) {
    // As Hugging Face has it, frequency and angle are floats: at position 100,000 an exact angle would be another one.
    const auto frequency = static_cast<float>(frequency_of(rope, i, context > rope.original_context));
    for (std::int64_t p = 0; p < positions; ++p) {
      const float angle = static_cast<float>(p) * frequency;
      cos[static_cast<std::size_t>(p * half + i)] = static_cast<float>(std::cos(static_cast<double>(angle)) * factor);
      sin[static_cast<std::size_t>(p * half + i)] = static_cast<float>(std::sin(static_cast<double>(angle)) * factor);
    }
  }
}

}  // namespace unshard::inference
