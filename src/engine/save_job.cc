#include "save_job.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "checkpoint/checksum_reader.h"
#include "unshard/core/error.h"

namespace unshard {

void SaveJob::copy_values() {
  const at::NoGradGuard no_grad;
  for (auto& piece : pieces) piece.value = piece.value.device().is_cpu() ? piece.value.clone() : piece.value.to(c10::kCPU);
  for (auto& [name, tensor] : state_tensors) tensor = tensor.device().is_cpu() ? tensor.clone() : tensor.to(c10::kCPU);
}

void SaveJob::write() {
  if (rank == 0) write_state();
  checkpoint::NamedTensors tensors;
  tensors.reserve(pieces.size());
  for (const auto& piece : pieces) tensors.emplace_back(piece.key, piece.value);
  const auto path = checkpoint::partial_of(directory) + "/" + checkpoint::rank_file(rank);
  const auto written = checkpoint::write_tensor_file(path, tensors, {{"format", "pt"}});
  checkpoint::FileRecord record;
  record.bytes = written.bytes;
  for (auto& piece : pieces) {
    piece.piece.crc32c = written.parts.at(piece.key);
    record.pieces.emplace(piece.key, std::move(piece.piece));
  }
  checkpoint::report_file(directory, rank, record, {});
}

void SaveJob::write_state() {
  const auto folder = checkpoint::partial_of(directory) + "/";
  const auto text = folder + checkpoint::kStateText;
  checkpoint::write_text(text, state_json);
  manifest.files[checkpoint::kStateText] = {static_cast<std::int64_t>(state_json.size()), checkpoint::checksum_file(text), {}};
  checkpoint::TensorFileOptions options;
  options.checksum_whole = true;
  const auto written = checkpoint::write_tensor_file(folder + checkpoint::kStateTensors, state_tensors, {{"format", "pt"}}, options);
  manifest.files[checkpoint::kStateTensors] = {written.bytes, written.crc32c, {}};
}

void SaveJob::finish() {
  if (rank == 0) checkpoint::commit(directory, std::move(manifest), commit);
}

BackgroundSave::BackgroundSave(SaveJob job) : job_(std::move(job)), thread_([this] { run(); }) {}

BackgroundSave::~BackgroundSave() {
  if (thread_.joinable()) thread_.join();
}

std::string BackgroundSave::wait() {
  if (thread_.joinable()) thread_.join();
  return error_;
}

void BackgroundSave::run() {
  try {
    job_.write();
  } catch (const std::exception& error) {
    error_ = error.what();
    try {
      checkpoint::report_file(job_.directory, job_.rank, {}, error_);
    } catch (const std::exception& report) {
      error_ += cat("; and rank 0 could not be told: ", report.what());
    }
  }
  job_.pieces.clear();  // the memory is free while rank 0 waits for the others
  try {
    job_.finish();
  } catch (const std::exception& error) {
    if (error_.empty()) error_ = error.what();
  }
}

}  // namespace unshard
