#include "inference/encoder/encoder_weights.h"

#include "inference/model/tensor_reader.h"

namespace unshard::inference {
namespace {

/// TensorReader knows a decoder's configuration; of it the family's name is enough here.
ModelConfig named(const std::string& family) {
  ModelConfig config;
  config.family = family;
  return config;
}

class EncoderLoader {
 public:
  EncoderLoader(const WeightSource& source, const EncoderConfig& config, const std::string& dtype, Workers& workers)
      : family_(named(config.family)), reader_(source, family_), config_(config), dtype_(dtype), workers_(workers) {
    if (reader_.has(config_.prefix + config_.names.words)) prefix_ = config_.prefix;
  }

  EncoderWeights load() {
    const auto& names = config_.names;
    weights_.words = reader_.matrix(prefix_ + names.words, config_.vocab, config_.hidden);
    weights_.parameters = config_.vocab * config_.hidden;
    weights_.bytes = weights_.words.rows * weights_.words.row_bytes();
    weights_.places = places();
    weights_.embedding_norm = norm(names.embedding_norm);
    for (std::int64_t i = 0; i < config_.layers; ++i) {
      const auto name = [&](const std::string& pattern) { return TensorReader::name(pattern, i); };
      EncoderLayer layer;
      layer.qkv = linear({name(names.q), name(names.k), name(names.v)}, config_.hidden, config_.hidden);
      layer.attention_output = linear({name(names.attention_output)}, config_.hidden, config_.hidden);
      layer.attention_norm = norm(name(names.attention_norm));
      layer.up = linear({name(names.up)}, config_.intermediate, config_.hidden);
      layer.down = linear({name(names.down)}, config_.hidden, config_.intermediate);
      layer.output_norm = norm(name(names.output_norm));
      weights_.layers.push_back(std::move(layer));
    }
    return std::move(weights_);
  }

 private:
  /// A text is of segment 0 throughout: that row is added once for all.
  std::vector<float> places() {
    const auto view = reader_.matrix(prefix_ + config_.names.positions, config_.positions, config_.hidden);
    std::vector<float> table(static_cast<std::size_t>(view.rows * view.cols)), segment(static_cast<std::size_t>(config_.hidden));
    if (config_.types > 0) expand_row(reader_.matrix(prefix_ + config_.names.types, config_.types, config_.hidden), 0, segment.data());
    for (std::int64_t row = 0; row < view.rows; ++row) {
      float* out = table.data() + row * view.cols;
      expand_row(view, row, out);
      for (std::int64_t i = 0; i < view.cols; ++i) out[i] += segment[static_cast<std::size_t>(i)];
    }
    weights_.parameters += (config_.positions + config_.types) * config_.hidden;
    weights_.bytes += static_cast<std::int64_t>(table.size() * sizeof(float));
    return table;
  }

  /// The first BERT files call a norm's weight and bias gamma and beta.
  NormWeights norm(const std::string& name) {
    const auto full = prefix_ + name;
    weights_.parameters += 2 * config_.hidden;
    if (reader_.find(full, ".gamma") != nullptr)
      return {reader_.vector(full, ".gamma", config_.hidden), reader_.vector(full, ".beta", config_.hidden)};
    return {reader_.needed_vector(full, config_.hidden), reader_.vector(full, ".bias", config_.hidden)};
  }

  /// Matrices that share an input, [rows, cols] each, as one.
  Linear linear(const std::vector<std::string>& names, std::int64_t rows, std::int64_t cols) {
    std::vector<WeightView> parts;
    Linear joined;
    for (const auto& name : names) {
      parts.push_back(reader_.matrix(prefix_ + name, rows, cols));
      const auto bias = reader_.vector(prefix_ + name, ".bias", rows);
      joined.bias.insert(joined.bias.end(), bias.begin(), bias.end());
    }
    if (!joined.bias.empty() && joined.bias.size() != static_cast<std::size_t>(rows) * names.size())
      throw ModelError(cat(reader_.path(), ": '", prefix_, names.front(), "' and those beside it have biases for some only"));
    joined.matrix = Matrix::pack(parts, type_of(parts.front()), workers_);
    weights_.bytes += joined.matrix.bytes();
    weights_.parameters += joined.matrix.rows() * cols + static_cast<std::int64_t>(joined.bias.size());
    return joined;
  }

  WeightType type_of(const WeightView& view) const {
    const auto type = weight_type_for(dtype_, view.type);
    const bool grouped = type == WeightType::q4 || type == WeightType::q8;
    return grouped && view.cols % 32 != 0 ? WeightType::bf16 : type;  // rows that aren't whole groups
  }

  const ModelConfig family_;
  TensorReader reader_;
  const EncoderConfig& config_;
  const std::string& dtype_;
  Workers& workers_;
  std::string prefix_;
  EncoderWeights weights_;
};

}  // namespace

EncoderWeights load_encoder(const WeightSource& source, const EncoderConfig& config, const std::string& dtype, Workers& workers) {
  try {
    return EncoderLoader(source, config, dtype, workers).load();
  } catch (const std::invalid_argument& error) {
    throw ModelError(cat(source.path(), ": ", error.what()));
  }
}

}  // namespace unshard::inference
