#include "checkpoint/checksum_reader.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "checkpoint/crc32c.h"

namespace unshard::checkpoint {

ChecksumReader::ChecksumReader(std::string path)
    : path_(std::move(path)), file_(open_to_read(path_)), buffer_(std::make_unique_for_overwrite<std::byte[]>(kBytes)) {
  (void)::posix_fadvise(file_.get(), 0, 0, POSIX_FADV_SEQUENTIAL);  // reads further ahead
}

std::uint32_t ChecksumReader::checksum(std::int64_t begin, std::int64_t end) {
  std::uint32_t crc = 0;
  while (begin < end) {
    const auto size = static_cast<std::size_t>(std::min<std::int64_t>(end - begin, kBytes));
    read_exactly(file_, path_, buffer_.get(), size, begin);
    crc = crc32c(crc, buffer_.get(), size);
    begin += static_cast<std::int64_t>(size);
  }
  return crc;
}

std::uint32_t checksum_file(const std::string& path) {
  ChecksumReader reader(path);
  return reader.checksum(0, file_bytes(open_to_read(path), path));
}

}  // namespace unshard::checkpoint
