#include "tensor_file.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "unshard/core/error.h"

namespace unshard {
namespace {

using Json = nlohmann::json;

constexpr std::pair<c10::ScalarType, const char*> kTypes[] = {
    {c10::ScalarType::Float, "F32"}, {c10::ScalarType::BFloat16, "BF16"}, {c10::ScalarType::Half, "F16"},  {c10::ScalarType::Double, "F64"},
    {c10::ScalarType::Long, "I64"},  {c10::ScalarType::Int, "I32"},       {c10::ScalarType::Short, "I16"}, {c10::ScalarType::Char, "I8"},
    {c10::ScalarType::Byte, "U8"},   {c10::ScalarType::Bool, "BOOL"}};

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw CheckpointError(cat("[engine.checkpoint] ", path, ": ", what));
}
[[noreturn]] void fail_system(const std::string& path, const char* what) { fail(path, cat(what, ": ", std::strerror(errno))); }

struct Descriptor {
  explicit Descriptor(int fd) : fd(fd) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

std::string type_name(const std::string& path, c10::ScalarType dtype) {
  for (const auto& [type, name] : kTypes) {
    if (type == dtype) return name;
  }
  fail(path, cat("dtype ", dtype, " can't be stored"));
}

void write_all(const std::string& path, int fd, const void* data, std::size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const auto written = ::write(fd, bytes, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail_system(path, "can't write");
    bytes += written;
    size -= static_cast<std::size_t>(written);
  }
}

void read_all(const std::string& path, int fd, void* data, std::size_t size, std::int64_t offset) {
  auto* bytes = static_cast<char*>(data);
  while (size > 0) {
    const auto got = ::pread(fd, bytes, size, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_system(path, "can't read");
    if (got == 0) fail(path, "the file is cut short");
    bytes += got;
    offset += got;
    size -= static_cast<std::size_t>(got);
  }
}

}  // namespace

void sync_path(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY));
  if (file.fd < 0) fail_system(path, "can't open");
  if (::fsync(file.fd) != 0) fail_system(path, "can't sync");
}

void write_tensor_file(const std::string& path, const NamedTensors& tensors, const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  header["__metadata__"] = metadata;
  std::int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto bytes = tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
    if (header.contains(name)) fail(path, cat("two tensors are named ", name));
    header[name] = {
        {"dtype", type_name(path, tensor.scalar_type())}, {"shape", tensor.sizes().vec()}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.fd < 0) fail_system(path, "can't create");
  const auto length = static_cast<std::uint64_t>(text.size());
  write_all(path, file.fd, &length, sizeof(length));
  write_all(path, file.fd, text.data(), text.size());
  for (const auto& [name, tensor] : tensors) {
    const auto here = tensor.device().is_cpu() ? tensor.contiguous() : tensor.to(c10::kCPU).contiguous();
    write_all(path, file.fd, here.const_data_ptr(), static_cast<std::size_t>(here.numel()) * here.element_size());
  }
  if (::fsync(file.fd) != 0) fail_system(path, "can't sync");
}

TensorFile::TensorFile(std::string path) : path_(std::move(path)), descriptor_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (descriptor_ < 0) fail_system(path_, "can't open");
  try {
    struct stat info {};
    if (::fstat(descriptor_, &info) != 0) fail_system(path_, "can't stat");
    std::uint64_t length = 0;
    read_all(path_, descriptor_, &length, sizeof(length), 0);
    if (length > static_cast<std::uint64_t>(info.st_size) || length > (std::uint64_t{1} << 32))
      fail(path_, "not a tensor file (header length)");
    std::string text(length, '\0');
    read_all(path_, descriptor_, text.data(), text.size(), sizeof(length));
    const auto header = Json::parse(text);
    const auto base = static_cast<std::int64_t>(sizeof(length) + length);
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") {
        metadata_ = value.get<std::map<std::string, std::string>>();
        continue;
      }
      Entry entry;
      bool known = false;
      for (const auto& [type, type_name] : kTypes) {
        if (value.at("dtype") != type_name) continue;
        entry.dtype = type;
        known = true;
      }
      if (!known) fail(path_, cat("dtype of '", name, "' is unknown"));
      entry.sizes = value.at("shape").get<std::vector<std::int64_t>>();
      entry.begin = base + value.at("data_offsets").at(0).get<std::int64_t>();
      entry.end = base + value.at("data_offsets").at(1).get<std::int64_t>();
      std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
      for (const auto size : entry.sizes) bytes *= size;
      if (entry.begin < base || entry.end - entry.begin != bytes || entry.end > info.st_size) {
        fail(path_,
             cat("'", name, "' needs bytes [", entry.begin, ", ", entry.end, "), the file has ", info.st_size, ": damaged or cut short"));
      }
      entries_.emplace(name, std::move(entry));
    }
  } catch (const Json::exception& error) {
    ::close(descriptor_);
    fail(path_, cat("the header is damaged: ", error.what()));
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

TensorFile::~TensorFile() { ::close(descriptor_); }

at::Tensor TensorFile::read(const std::string& name) const {
  const auto at = entries_.find(name);
  if (at == entries_.end()) fail(path_, cat("has no tensor '", name, "'"));
  auto tensor = at::empty(at->second.sizes, at::TensorOptions().dtype(at->second.dtype));
  read_all(path_, descriptor_, tensor.mutable_data_ptr(), static_cast<std::size_t>(at->second.end - at->second.begin), at->second.begin);
  return tensor;
}

}  // namespace unshard
