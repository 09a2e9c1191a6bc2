#include "inference/model/tensor_reader.h"

#include <cstring>
#include <sstream>

#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

/// One of the name's parts is a number: model.layers.3.mlp.up_proj.weight.
bool of_a_layer(const std::string& name) {
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');)
    if (!part.empty() && part.find_first_not_of("0123456789") == std::string::npos) return true;
  return false;
}

/// What old files hold beside weights: frequencies of positions, and GPT-2's causal masks.
bool is_table(const std::string& name) {
  for (const char* end : {".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias"})
    if (name.ends_with(end)) return true;
  return false;
}

}  // namespace

TensorReader::TensorReader(const WeightSource& source, const ModelConfig& config, bool values)
    : source_(source), config_(config), values_(values) {}

void TensorReader::done_with_read() {
  for (const auto& view : read_) source_.done_with(view);
  read_.clear();
}

std::string TensorReader::name(const std::string& pattern, std::int64_t layer, std::int64_t expert) {
  std::string text = pattern;
  for (const auto& [mark, number] : {std::pair<const char*, std::int64_t>{"{}", layer}, {"{e}", expert}})
    if (const auto at = text.find(mark); at != std::string::npos) text.replace(at, std::strlen(mark), std::to_string(number));
  return text;
}

const WeightView* TensorReader::find(const std::string& name, const char* kind) const {
  if (name.empty()) return nullptr;
  for (const char* prefix : {"", "transformer.", "model."})
    if (const auto* view = found(cat(prefix, name, kind))) return view;
  if (name.starts_with("model.")) return found(cat(name.substr(6), kind));  // saved from the model without its head
  return nullptr;
}

const WeightView* TensorReader::found(const std::string& name) const {
  const auto* view = source_.find(name);
  if (view) known_.insert(view->name);
  return view;
}

std::vector<std::string> TensorReader::unread() const {
  std::vector<std::string> names;
  for (const auto& name : source_.names())
    if (!known_.contains(name) && of_a_layer(name) && !is_table(name)) names.push_back(name);
  return names;
}

const WeightView& TensorReader::needed(const std::string& name) const {
  if (const auto* view = find(name, ".weight")) return *view;
  throw ModelError(cat(source_.path(), ": there is no tensor '", name, ".weight', which a model of type '", config_.family, "' has"));
}

WeightView TensorReader::make(const WeightView& like, std::int64_t rows, std::int64_t cols, FileType type) {
  WeightView made{type, nullptr, rows, cols, like.name};
  if (!values_) {
    made.data = like.data;
    return made;
  }
  made_.emplace_back(static_cast<std::size_t>(rows * made.row_bytes()));
  made.data = made_.back().data();
  return made;
}

WeightView TensorReader::matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
  const WeightView& stored = needed(name);
  const std::int64_t stored_rows = config_.transposed ? cols : rows, stored_cols = config_.transposed ? rows : cols;
  if ((stored_rows != 0 && stored.rows != stored_rows) || (stored_cols != 0 && stored.cols != stored_cols))
    throw ModelError(cat(source_.path(), ": '", stored.name, "' is [", stored.rows, ", ", stored.cols, "]; the configuration wants [",
                         stored_rows, ", ", stored_cols, "]"));
  if (values_) read_.push_back(stored);
  if (!config_.transposed) return stored;
  const WeightView turned = make(stored, stored.cols, stored.rows, FileType::f32);
  if (!values_) return turned;
  auto* out = reinterpret_cast<float*>(made_.back().data());
  std::vector<float> row(static_cast<std::size_t>(stored.cols));
  for (std::int64_t r = 0; r < stored.rows; ++r) {
    expand_row(stored, r, row.data());
    for (std::int64_t c = 0; c < stored.cols; ++c) out[c * stored.rows + r] = row[static_cast<std::size_t>(c)];
  }
  return turned;
}

WeightView TensorReader::part(const WeightView& whole, std::int64_t first, std::int64_t rows) {
  return {whole.type, whole.row(first), rows, whole.cols, whole.name};
}

WeightView TensorReader::columns(const WeightView& whole, Range range) {
  if (range.size() == whole.cols) return whole;
  const auto unit = block_values(whole.type);
  if (range.begin % unit != 0 || range.size() % unit != 0)
    throw ModelError(cat(source_.path(), ": '", whole.name, "' is held in blocks of ", unit, " values, which ", range.begin, " to ",
                         range.end, " cuts; use another number of ranks"));
  const WeightView cut = make(whole, whole.rows, range.size(), whole.type);
  if (!values_) return cut;
  for (std::int64_t r = 0; r < whole.rows; ++r)
    std::memcpy(made_.back().data() + r * cut.row_bytes(),
                static_cast<const char*>(whole.row(r)) + range.begin / unit * block_bytes(whole.type),
                static_cast<std::size_t>(cut.row_bytes()));
  return cut;
}

WeightView TensorReader::half_split(const WeightView& view, std::int64_t heads) {
  if (!config_.interleaved_qk) return view;
  const WeightView sorted = make(view, view.rows, view.cols, view.type);
  if (!values_) return sorted;
  const std::int64_t size = view.rows / heads, half = size / 2, bytes = view.row_bytes();
  for (std::int64_t head = 0; head < heads; ++head)
    for (std::int64_t i = 0; i < size; ++i)
      std::memcpy(made_.back().data() + (head * size + i) * bytes, view.row(head * size + i % half * 2 + i / half),
                  static_cast<std::size_t>(bytes));
  return sorted;
}

void TensorReader::half_split(std::vector<float>& bias, std::int64_t heads) {
  const auto from = bias;
  const auto size = static_cast<std::int64_t>(bias.size()) / heads, half = size / 2;
  for (std::int64_t head = 0; head < heads; ++head)
    for (std::int64_t i = 0; i < size; ++i)
      bias[static_cast<std::size_t>(head * size + i)] = from[static_cast<std::size_t>(head * size + i % half * 2 + i / half)];
}

std::vector<float> TensorReader::vector(const std::string& name, const char* kind, std::int64_t width) const {
  const WeightView* view = find(name, kind);
  if (!view) return {};
  if (view->rows * view->cols != width)
    throw ModelError(cat(source_.path(), ": '", view->name, "' has ", view->rows * view->cols, " values; the configuration wants ", width));
  std::vector<float> values(static_cast<std::size_t>(width));
  WeightView flat = *view;
  flat.rows = 1, flat.cols = width;
  expand_row(flat, 0, values.data());
  return values;
}

std::vector<float> TensorReader::needed_vector(const std::string& name, std::int64_t width) const {
  needed(name);
  return vector(name, ".weight", width);
}

}  // namespace unshard::inference
