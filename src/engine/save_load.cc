// The whole training state to a folder and back: one tensor file a rank with its own pieces, and a manifest that is written last.
//
// [Note: complete or absent] Everything is written to "<directory>.partial" and synced; when all ranks are done, rank 0 writes the manifest
// and renames. An interrupted save leaves the former folder, or the former one as "<directory>.former" for the instant between two renames.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "agreement.h"
#include "engine_state.h"
#include "flat.h"
#include "tensor_file.h"
#include "unshard/core/dtype.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kFormat = 1;
const char* const kManifest = "manifest.json";

std::string rank_file(int rank) { return cat("rank_", rank, ".safetensors"); }

Json group_json(const GroupOptions& group) {
  return {{"lr", group.lr},
          {"beta1", group.beta1},
          {"beta2", group.beta2},
          {"eps", group.eps},
          {"weight_decay", group.weight_decay},
          {"momentum", group.momentum},
          {"dampening", group.dampening},
          {"lr_decay", group.lr_decay},
          {"initial_accumulator", group.initial_accumulator},
          {"nesterov", group.nesterov},
          {"bias_correction", group.bias_correction},
          {"maximize", group.maximize}};
}

void read_group(const Json& json, GroupOptions& group) {
  json.at("lr").get_to(group.lr);
  json.at("beta1").get_to(group.beta1);
  json.at("beta2").get_to(group.beta2);
  json.at("eps").get_to(group.eps);
  json.at("weight_decay").get_to(group.weight_decay);
  json.at("momentum").get_to(group.momentum);
  json.at("dampening").get_to(group.dampening);
  json.at("lr_decay").get_to(group.lr_decay);
  json.at("initial_accumulator").get_to(group.initial_accumulator);
  json.at("nesterov").get_to(group.nesterov);
  json.at("bias_correction").get_to(group.bias_correction);
  json.at("maximize").get_to(group.maximize);
}

}  // namespace

// What every rank knows alike.
std::string Engine::State::manifest(const std::string& client_state) const {
  Json json;
  json["format"] = kFormat;
  json["world_size"] = comm->world_size();
  json["stage"] = config.zero.stage;
  json["optimizer"] = optimizer ? optimizer->type() : "";
  json["counters"] = {{"micro_steps", counters.micro_steps},
                      {"global_steps", counters.global_steps},
                      {"global_samples", counters.global_samples},
                      {"skipped_steps", counters.skipped_steps},
                      {"applied_updates", counters.applied_updates}};
  if (scaler) {
    const auto state = scaler->state();
    json["loss_scaler"] = {{"scale", state.scale},
                           {"iteration", state.iteration},
                           {"last_overflow", state.last_overflow},
                           {"hysteresis_left", state.hysteresis_left}};
  }
  for (const auto& group : groups) json["groups"].push_back(group_json(group));
  for (const auto& group : initial_groups) json["initial_groups"].push_back(group_json(group));
  for (const auto& parameter : model.parameters()) {
    json["parameters"].push_back({{"name", parameter.name},
                                  {"shape", parameter.geometry.sizes},
                                  {"strides", parameter.geometry.strides},
                                  {"dtype", dtype_name(parameter.dtype)},
                                  {"steps", optimizer && parameter.is_trained() ? optimizer->step_count(parameter.id) : 0}});
  }
  json["client_state"] = client_state;
  return json.dump(1);
}

void Engine::State::write_rank_file(const std::string& path) {
  NamedTensors tensors;
  for (const auto& parameter : model.parameters()) {
    tensors.emplace_back("param." + parameter.name, piece(parameter.id));
    if (masters->has(parameter.id)) tensors.emplace_back("fp32." + parameter.name, masters->piece(parameter.id));
    if (!optimizer || !parameter.is_trained() || optimizer->step_count(parameter.id) == 0) continue;
    for (const auto& name : optimizer->state_names()) {
      const auto state = state_domain(parameter.id, name);
      if (state.defined()) tensors.emplace_back(cat("state.", name, ".", parameter.name), own_part(state, parameter));
    }
  }
  write_tensor_file(path, tensors, {{"rank", std::to_string(comm->rank())}, {"world_size", std::to_string(comm->world_size())}});
}

void Engine::save(const std::string& directory, const std::string& client_state_json) {
  auto& s = *state_;
  s.require_alive("save");
  const at::NoGradGuard no_grad;
  s.comm->check_all_in(cat("save(", directory, ")"));
  const bool unfinished = s.pipeline->any_present() || s.micro_steps_since_boundary != 0;  // perhaps on some ranks only
  agree_no_error(*s.comm, unfinished ? "called in the middle of a gradient accumulation; save after the step() that ends it" : "",
                 "engine.save");
  s.set_phase(Phase::collective, "save");
  s.refresh_masters(s.store->settle());
  for (int id = 0; id < s.store->size(); ++id) s.take_edits(id);
  const auto target = fs::absolute(fs::path(directory)).lexically_normal().string();
  const std::string partial = target + ".partial", former = target + ".former";
  const auto attempt = [&](const char* where, const std::function<void()>& work) {
    std::string error;
    try {
      work();
    } catch (const CommError&) {
      throw;  // a rank is lost: that is no error of the file's
    } catch (const std::exception& exception) {
      error = exception.what();
    }
    s.agree_checkpoint(error, where);
  };
  attempt("save", [&] {
    if (s.comm->rank() != 0) return;
    fs::remove_all(partial);
    fs::create_directories(partial);
  });
  attempt("save", [&] { s.write_rank_file(partial + "/" + rank_file(s.comm->rank())); });
  attempt("save", [&] {
    if (s.comm->rank() != 0) return;
    std::ofstream manifest(partial + "/" + kManifest, std::ios::binary);
    manifest << s.manifest(client_state_json);
    manifest.close();
    if (!manifest) throw CheckpointError(cat("[engine.save] can't write ", partial, "/", kManifest));
    sync_path(partial + "/" + kManifest);
    sync_path(partial);
    fs::remove_all(former);
    if (fs::exists(target)) fs::rename(target, former);
    fs::rename(partial, target);
    sync_path(fs::path(target).parent_path().string());
    fs::remove_all(former);
  });
  s.set_phase(Phase::idle, "after save");
}

// \throws CheckpointError on all ranks when one has an error with its file. \throws CommError a rank is lost meanwhile.
void Engine::State::agree_checkpoint(const std::string& error, const char* where) {
  if (const auto agreed = agree_on_error(*comm, error, where); !agreed.empty()) throw CheckpointError(agreed);
}

namespace {

Json read_manifest(const std::string& directory) {
  const auto path = directory + "/" + kManifest;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw CheckpointError(cat("[engine.load] ", path, " is missing: not a saved state, or the save didn't finish"));
  try {
    return Json::parse(file);
  } catch (const Json::exception& error) {
    throw CheckpointError(cat("[engine.load] ", path, " is damaged: ", error.what()));
  }
}

}  // namespace

// Everything that can be wrong is found here, before anything is changed.
void Engine::State::check_saved(const TensorFile& file, const std::string& manifest_text, bool load_optimizer) const {
  const auto fail = [&](const auto&... parts) { throw CheckpointError(cat("[engine.load] ", file.path(), ": ", parts...)); };
  const auto json = Json::parse(manifest_text);
  if (json.at("format") != kFormat) fail("format ", json.at("format").dump(), "; this version reads ", kFormat);
  if (json.at("world_size") != comm->world_size()) {
    fail("saved by ", json.at("world_size").dump(), " ranks, loaded by ", comm->world_size(), "; the same number is needed");
  }
  std::map<std::string, std::vector<std::int64_t>> saved;
  for (const auto& entry : json.at("parameters")) saved[entry.at("name")] = entry.at("shape").get<std::vector<std::int64_t>>();
  for (const auto& parameter : model.parameters()) {
    const auto at = saved.find(parameter.name);
    if (at == saved.end()) fail("has no parameter '", parameter.name, "'");
    if (at->second != parameter.geometry.sizes) {
      fail("'", parameter.name, "' has shape ", at::IntArrayRef(at->second), ", the model's is ",
           at::IntArrayRef(parameter.geometry.sizes));
    }
    saved.erase(at);
    const auto entry = file.entries().find("param." + parameter.name);
    if (entry == file.entries().end()) fail("the values of '", parameter.name, "' are missing");
    if (entry->second.sizes != std::vector<std::int64_t>{parameter.layout.size(comm->rank())})
      fail("the piece of '", parameter.name, "' has another size");
  }
  if (!saved.empty()) fail("has a parameter '", saved.begin()->first, "' that the model lacks");
  if (!load_optimizer) return;
  const std::string type = optimizer ? optimizer->type() : "";
  if (json.at("optimizer") != type)
    fail("saved with optimizer ", json.at("optimizer").dump(), ", loaded with \"", type,
         "\"; pass load_optimizer=false to take the weights only");
  if (json.at("groups").size() != groups.size()) fail("has ", json.at("groups").size(), " parameter groups, the engine ", groups.size());
  for (const auto& entry : json.at("parameters")) {
    const auto* parameter = model.find(entry.at("name").get<std::string>());
    if (entry.at("steps") == 0 || !parameter->is_trained()) continue;
    for (const auto& name : optimizer->state_names()) {
      const auto key = cat("state.", name, ".", parameter->name);
      const auto state = file.entries().find(key);
      if (state != file.entries().end() && state->second.sizes != std::vector<std::int64_t>{parameter->layout.size(comm->rank())}) {
        fail("'", key, "' has another size");
      }
    }
  }
}

// The pieces of all ranks into what this rank keeps: the whole at stage 0, else its own.
void Engine::State::fill_domain(const at::Tensor& domain, const at::Tensor& piece, const ModelParameter& parameter) {
  const auto here = piece.device() == domain.device() ? piece : piece.to(domain.device());
  const auto source = keeps_whole() ? gather_pieces(here, parameter, "load") : here;
  if (domain.numel() == 0) return;
  if (flat::is_supported(domain.scalar_type()) && flat::is_supported(source.scalar_type())) {
    flat::copy(domain, source);
  } else {
    domain.copy_(source);
  }
}

void Engine::State::restore(const TensorFile& file, const std::string& manifest_text, bool load_optimizer) {
  const auto json = Json::parse(manifest_text);
  for (const auto& parameter : model.parameters()) {
    const bool has_master = file.entries().contains("fp32." + parameter.name);
    const auto value = file.read((has_master ? "fp32." : "param.") + parameter.name);
    if (masters->has(parameter.id)) fill_domain(masters->domain(parameter.id), value, parameter);
    fill_domain(domain(parameter.id), value, parameter);
  }
  const std::vector<std::uint8_t> all(static_cast<std::size_t>(store->size()), 1);
  keeps_whole() ? publish(all) : store->publish(all);
  if (!load_optimizer) return;
  for (const auto& entry : json.at("parameters")) {
    const auto* parameter = model.find(entry.at("name").get<std::string>());
    const auto steps = entry.at("steps").get<std::int64_t>();
    if (!optimizer || !parameter->is_trained() || steps == 0) continue;
    for (const auto& name : optimizer->state_names()) {
      const auto key = cat("state.", name, ".", parameter->name);
      if (!file.entries().contains(key)) continue;
      fill_domain(state_domain(parameter->id, name), file.read(key), *parameter);
    }
    optimizer->set_step_count(parameter->id, steps);
  }
  const auto& saved = json.at("counters");
  saved.at("micro_steps").get_to(counters.micro_steps);
  saved.at("global_steps").get_to(counters.global_steps);
  saved.at("global_samples").get_to(counters.global_samples);
  saved.at("skipped_steps").get_to(counters.skipped_steps);
  saved.at("applied_updates").get_to(counters.applied_updates);
  if (scaler && json.contains("loss_scaler")) {
    const auto& scale = json.at("loss_scaler");
    scaler->set_state({scale.at("scale"), scale.at("iteration"), scale.at("last_overflow"), scale.at("hysteresis_left")});
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    read_group(json.at("groups").at(g), groups[g]);
    read_group(json.at("initial_groups").at(g), initial_groups[g]);
  }
  comm->set_step(counters.global_steps);
  refresh_factor();
}

std::string Engine::load(const std::string& directory, bool load_optimizer) {
  auto& s = *state_;
  s.require_alive("load");
  const at::NoGradGuard no_grad;
  s.comm->check_all_in(cat("load(", directory, ")"));
  s.set_phase(Phase::collective, "load");
  s.reload();
  std::unique_ptr<TensorFile> file;
  std::string text, client_state, error;
  try {
    const auto json = read_manifest(directory);
    text = json.dump();
    file = std::make_unique<TensorFile>(directory + "/" + rank_file(s.comm->rank()));
    s.check_saved(*file, text, load_optimizer);
    client_state = json.at("client_state").get<std::string>();
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  s.agree_checkpoint(error, "engine.load");
  zero_grad();
  s.store->settle();
  s.restore(*file, text, load_optimizer);
  s.set_phase(Phase::idle, "after load");
  return client_state;
}

}  // namespace unshard
