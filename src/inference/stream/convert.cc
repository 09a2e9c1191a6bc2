#include "inference/stream/convert.h"

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>

#include "inference/stream/checksum.h"
#include "inference/stream/weight_file.h"
#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

/// Matrices as they are packed, into the buffer of the unit under way.
class Converter {
 public:
  Converter(const UnitLoader& loader, const std::vector<Unit>& units, bool two_at_once, Workers& workers)
      : units_(units),
        loader_(loader.source, loader.config, loader.dtype, loader.shard, making(workers)),
        outputs_(loader.outputs),
        layers_(loader.config.layers),
        buffers_(two_at_once ? 2 : 1) {
    std::int64_t largest = 0;
    for (const auto& unit : units) largest = std::max(largest, unit.bytes);
    for (auto& buffer : buffers_) buffer.memory = offload::AlignedBuffer(largest);
  }

  void write(const offload::AsyncFile& file, const std::string& key) {
    const auto header = header_bytes(key, units_.size());
    std::int64_t end = header;
    for (const auto& unit : units_) end += unit.bytes;
    file.reserve(end);
    std::vector<StoredUnit> stored;
    std::int64_t offset = header;
    for (std::size_t i = 0; i < units_.size(); ++i) {
      stored.push_back({offset, fill(i)});
      auto& buffer = this->buffer(i);
      buffer.ticket = queue_.write(file, offset, units_[i].bytes, buffer.memory.data());
      offset += units_[i].bytes;
    }
    const auto text = header_of(key, units_, stored);
    queue_.wait(queue_.write(file, 0, header, text.data()));
    queue_.wait_all();
    file.sync();
  }

 private:
  struct Buffer {
    offload::AlignedBuffer memory;
    std::optional<offload::AsyncQueue::Ticket> ticket;
  };
  Buffer& buffer(std::size_t unit) { return buffers_[unit % buffers_.size()]; }

  MakeMatrix making(Workers& workers) {
    return [this, pack = pack_with(workers)](std::span<const WeightView> parts, WeightType type, bool gated) {
      Matrix matrix = pack(parts, type, gated);
      auto& packed = matrix.packed();
      const auto& places = units_[unit_].places;
      UNSHARD_DCHECK(matrix_ < places.size() && places[matrix_].matrix->bytes == packed.bytes, "unit ", unit_, " has another matrix ",
                     matrix_);
      std::memcpy(buffer(unit_).memory.data() + places[matrix_++].offset, packed.data.get(), static_cast<std::size_t>(packed.bytes));
      packed.place(nullptr);
      return matrix;
    };
  }

  /// \return its checksum
  std::uint64_t fill(std::size_t i) {
    auto& [memory, ticket] = buffer(i);
    if (ticket) queue_.wait(*std::exchange(ticket, std::nullopt));
    const auto bytes = static_cast<std::size_t>(units_[i].bytes);
    std::memset(memory.data(), 0, bytes);
    unit_ = i;
    matrix_ = 0;
    if (const auto layer = static_cast<std::int64_t>(i); layer < layers_)
      loader_.layer(layer);
    else
      loader_.output(outputs_[i - static_cast<std::size_t>(layers_)]);
    loader_.done_with_read();
    malloc_trim(0);  // else freed matrices stay, as many as malloc's threads and thresholds happen to keep: some layers' worth
    UNSHARD_DCHECK(matrix_ == units_[i].places.size(), "unit ", i, " has ", matrix_, " matrices");
    return checksum(memory.data(), bytes);
  }

  const std::vector<Unit>& units_;
  WeightLoader loader_;
  const std::vector<Range>& outputs_;
  const std::int64_t layers_;
  std::vector<Buffer> buffers_;
  std::size_t unit_ = 0, matrix_ = 0;
  offload::AsyncQueue queue_;  ///< last: it lets go of the buffers before they are freed
};

/// A name that appears with all that the folder's disk needs to know of it.
void rename_for_good(const std::string& from, const std::string& to) {
  std::filesystem::rename(from, to);
  const int folder = ::open(std::filesystem::path(to).parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;  // may be listed by nobody: then the rename lasts as the system likes
  ::fsync(folder);
  ::close(folder);
}

}  // namespace

void convert_weights(const UnitLoader& loader, const std::vector<Unit>& units, const std::string& path, const std::string& key,
                     bool two_at_once, Workers& workers) {
  const std::string part = cat(path, ".part.", ::getpid());
  std::error_code ignored;
  std::filesystem::remove(part, ignored);  // of a killed process of the same number: it may be longer than this one's
  try {
    {
      Converter converter(loader, units, two_at_once, workers);
      const offload::AsyncFile file(part, offload::Access::write);
      converter.write(file, key);
    }
    rename_for_good(part, path);
  } catch (const std::exception& error) {
    std::filesystem::remove(part, ignored);
    if (dynamic_cast<const ModelError*>(&error)) throw;
    throw ModelError(
        cat(loader.source.path(), ": its weights can't be packed into a file: ", error.what(), "; weight_cache names another folder"));
  }
}

}  // namespace unshard::inference
