#include "checkpoint/native_source.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "checkpoint/checksum_reader.h"
#include "checkpoint/system_file.h"
#include "unshard/core/error.h"

namespace unshard::checkpoint {

void Source::read_into(const Range& range, at::Tensor& out) {
  const auto value = read(range);
  if (!value.defined() || value.numel() != range.end - range.begin)
    fail(contents().origin, cat("'", range.kind, ".", range.name, "' came with ", value.defined() ? value.numel() : 0, " elements for [",
                                range.begin, ", ", range.end, ")"));
  const at::NoGradGuard no_grad;
  out.copy_(value.reshape({-1}));
}

NativeSource::NativeSource(std::string directory) : directory_(std::move(directory)), manifest_(Manifest::read(directory_)) {
  for (const auto& [file, record] : manifest_.files) {
    for (const auto& [key, piece] : record.pieces) parts_[{piece.kind, piece.parameter}].push_back({file, key, &piece});
  }
  for (auto& [value, parts] : parts_) {
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.piece->begin < b.piece->begin; });
  }
}

const std::vector<NativeSource::Part>& NativeSource::parts_of(const Range& range) const {
  const auto at = parts_.find({range.kind, range.name});
  if (at == parts_.end()) fail(manifest_.contents.origin, cat("has no '", range.kind, "' of '", range.name, "'"));
  const auto numel = at->second.back().piece->end;
  UNSHARD_DCHECK(0 <= range.begin && range.begin <= range.end && range.end <= numel, "[", range.begin, ", ", range.end, ") of ", numel);
  return at->second;
}

// A file is compared with the manifest when it is first needed.
const TensorFile& NativeSource::file(const std::string& name) {
  auto& slot = files_[name];
  if (slot) return *slot;
  auto opened = std::make_unique<TensorFile>(directory_ + "/" + name);
  const auto& record = manifest_.files.at(name);
  if (opened->bytes() != record.bytes)
    fail(opened->path(), cat("has ", opened->bytes(), " bytes, the manifest says ", record.bytes, ": damaged, or of another save"));
  for (const auto& [key, piece] : record.pieces) {
    if (const auto numel = opened->entry(key).numel(); numel != piece.end - piece.begin)
      fail(opened->path(), cat("'", key, "' has ", numel, " elements, the manifest says ", piece.end - piece.begin));
  }
  slot = std::move(opened);
  return *slot;
}

c10::ScalarType NativeSource::dtype_of(const Range& range) {
  const auto& parts = parts_of(range);
  const auto dtype = file(parts.front().file).entry(parts.front().key).dtype;
  for (const auto& part : parts) {
    if (part.piece->end <= range.begin || part.piece->begin >= range.end) continue;
    if (const auto other = file(part.file).entry(part.key).dtype; other != dtype)
      fail(file(part.file).path(), cat("'", part.key, "' is ", other, ", in ", parts.front().file, " it is ", dtype));
  }
  return dtype;
}

void NativeSource::read_parts(const Range& range, c10::ScalarType dtype, void* out) {
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const auto& part : parts_of(range)) {
    const auto begin = std::max(range.begin, part.piece->begin), end = std::min(range.end, part.piece->end);
    if (begin >= end) continue;
    file(part.file).read_elements(part.key, begin - part.piece->begin, end - part.piece->begin,
                                  static_cast<std::byte*>(out) + (begin - range.begin) * width);
  }
}

at::Tensor NativeSource::read(const Range& range) {
  const auto dtype = dtype_of(range);
  auto value = at::empty({range.end - range.begin}, at::TensorOptions().dtype(dtype));
  read_parts(range, dtype, value.mutable_data_ptr());
  return value;
}

void NativeSource::read_into(const Range& range, at::Tensor& out) {
  const auto dtype = dtype_of(range);
  if (out.scalar_type() != dtype || !out.device().is_cpu() || !out.is_contiguous()) return Source::read_into(range, out);
  UNSHARD_DCHECK(out.numel() == range.end - range.begin, out.numel());
  read_parts(range, dtype, out.mutable_data_ptr());
}

void NativeSource::check(const std::vector<Range>& ranges) {
  for (const auto& range : ranges) dtype_of(range);
  for (const auto& [name, record] : manifest_.files) {
    if (!record.crc32c) continue;
    const auto path = directory_ + "/" + name;
    const auto bytes = file_bytes(open_to_read(path), path);
    if (bytes != record.bytes) fail(path, cat("has ", bytes, " bytes, the manifest says ", record.bytes, ": damaged, or of another save"));
  }
}

// In the order in which they lie on the disk.
std::vector<NativeSource::Checked> NativeSource::checksums(bool with_optimizer) {
  std::vector<Checked> all;
  for (const auto& [name, record] : manifest_.files) {
    const auto first = static_cast<std::ptrdiff_t>(all.size());
    if (record.crc32c) all.push_back({&name, nullptr, 0, record.bytes, *record.crc32c});
    for (const auto& [key, piece] : record.pieces) {
      if (!with_optimizer && piece.kind != kParam && piece.kind != kFp32) continue;
      const auto& entry = file(name).entry(key);
      all.push_back({&name, &key, entry.begin, entry.end, piece.crc32c});
    }
    std::sort(all.begin() + first, all.end(), [](const Checked& a, const Checked& b) { return a.begin < b.begin; });
  }
  return all;
}

// Parts are cut by bytes, in the order of the files: with as many parts as ranks wrote, each is one file, which its rank then reads again.
void NativeSource::verify(int part, int parts, bool with_optimizer) {
  const auto all = checksums(with_optimizer);
  std::int64_t total = 0, place = 0;
  for (const auto& one : all) total += one.end - one.begin;
  std::optional<ChecksumReader> reader;
  for (const auto& one : all) {
    const auto bytes = one.end - one.begin;
    const auto middle = place + bytes / 2;
    place += bytes;
    if (static_cast<__int128>(middle) * parts / std::max<std::int64_t>(total, 1) != part) continue;
    if (const auto path = directory_ + "/" + *one.file; !reader || reader->path() != path) reader.emplace(path);
    if (const auto found = reader->checksum(one.begin, one.end); found != one.said) {
      fail(one.key ? cat(reader->path(), ": '", *one.key, "'") : reader->path(),
           cat("the values are damaged: checksum ", checksum_text(found), ", the manifest says ", checksum_text(one.said)));
    }
  }
}

std::unique_ptr<Source> open(const std::string& directory) { return std::make_unique<NativeSource>(directory); }

void verify(const std::string& directory) {
  NativeSource source(directory);
  std::vector<Range> everything;
  for (const auto& parameter : source.contents().parameters) {
    for (const auto& kind : parameter.kinds) everything.push_back({kind, parameter.name, 0, parameter.numel()});
  }
  source.check(everything);
  source.verify(0, 1, true);
}

}  // namespace unshard::checkpoint
