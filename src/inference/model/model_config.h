#pragma once
// A decoder model described as data: sizes, switches and the names of its tensors. A new family is a function in families.cc.
#include <cstdint>
#include <string>
#include <vector>

#include "inference/kernels/matrix.h"
#include "unshard/inference/sampling.h"

namespace unshard::inference {

enum class NormKind { rms, layer };
enum class RopeKind { none, plain, linear, llama3, yarn, longrope };

struct RopeConfig {
  RopeKind kind = RopeKind::plain;
  double theta = 10000;
  std::int64_t rotary = 0;  ///< rotated features of a head (all, or the first part)
  double factor = 1, low_factor = 1, high_factor = 4, beta_fast = 32, beta_slow = 1;
  double attention_factor = 0;  ///< multiplies cos and sin; 0: as the kind says
  double mscale = 0, mscale_all_dim = 0;
  bool truncate = true;  ///< yarn: whole numbers for the borders of its ramp
  std::int64_t original_context = 0;
  std::vector<double> short_factors, long_factors;  ///< longrope
};

struct ExpertConfig {
  std::int64_t experts = 0;  ///< 0: a dense MLP
  std::int64_t chosen = 0;   ///< experts a token uses
  std::int64_t intermediate = 0;
  std::int64_t shared_intermediate = 0;  ///< of an expert that every token uses, gated by a sigmoid; 0: none
  bool normalise = true;                 ///< the chosen experts' weights sum to 1
  std::vector<bool> dense_layers;        ///< layers with a dense MLP; empty: none
  bool in_layer(std::int64_t layer) const {
    return experts > 0 && (dense_layers.empty() || !dense_layers[static_cast<std::size_t>(layer)]);
  }
};

/// Names of tensors without ".weight" and ".bias"; "{}" stands for the layer, "{e}" for the expert. Empty: the family has none.
struct TensorNames {
  std::string embedding, positions, final_norm, output;
  std::string attention_norm, q, k, v, qkv, attention_output, q_norm, k_norm, post_attention_norm;
  std::string mlp_norm, gate, up, gate_up, down, post_mlp_norm;
  std::string router, expert_gate, expert_up, expert_down;  ///< one matrix an expert ("{e}"), or all experts in one [E, N, K] (no "{e}")
  std::string shared_gate, shared_up, shared_down, shared_switch;
  bool experts_in_one() const { return expert_gate.find("{e}") == std::string::npos; }
};

struct ModelConfig {
  std::string family;
  std::int64_t vocab = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_size = 0, intermediate = 0, context = 0;
  NormKind norm = NormKind::rms;
  float norm_eps = 1e-5f;
  float norm_offset = 0;        ///< added to the norms' weights (Gemma: 1)
  RopeConfig rope, local_rope;  ///< local: of layers with a window, where those differ (Gemma 3)
  bool has_local_rope = false;
  bool learned_positions = false;  ///< GPT-2
  bool transposed = false;         ///< matrices but embedding and output are stored [K, N] (GPT-2's Conv1D)
  bool untied = false;             ///< the output matrix must be there; else a file without one uses the embedding
  bool gated = true;               ///< down(gate(x) * up(x)), else down(act(up(x)))
  Gate activation = Gate::silu;
  bool interleaved_qk = false;  ///< rows of q and k come as GGUF's llama has them: pairs side by side
  float attention_scale = 0;    ///< 0: 1 / sqrt(head_size)
  float attention_softcap = 0, logit_softcap = 0;
  float embedding_scale = 1;
  std::int64_t window = 0;     ///< 0: none
  std::vector<bool> windowed;  ///< layers that have the window; empty: all
  ExpertConfig experts;
  TensorNames names;
  std::vector<Token> end_tokens;

  /// Of a layer; 0: none.
  std::int64_t window_of(std::int64_t layer) const { return windowed.empty() || windowed[static_cast<std::size_t>(layer)] ? window : 0; }
  bool has_local_rope_in(std::int64_t layer) const { return has_local_rope && window_of(layer) > 0; }
};

/// The smaller first factors of cos and sin: [positions, rotary / 2] each. Source: rope scaling as Hugging Face defines it.
void rope_tables(const RopeConfig& rope, std::int64_t positions, std::int64_t context, std::vector<float>& cos, std::vector<float>& sin);

}  // namespace unshard::inference
