#pragma once
// Writes a file from its beginning to its end in large pieces past the page cache (O_DIRECT), two buffers in turn: one is filled while the
// other is written by a thread of its own. Where the file system has no direct writes (some tmpfs, overlays) the same goes through the
// cache.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "checkpoint/system_file.h"

namespace unshard::checkpoint {

struct WriterOptions {
  std::size_t buffer_bytes = 8 << 20;  ///< each of the two; a multiple of 4096
  bool direct = true;                  ///< false: through the page cache in any case
};

/// One thread fills it. Whatever fails (no space, a short write, a lost disk) is a CheckpointError of the next call.
class DirectWriter {
 public:
  /// Creates or empties the file, and sets aside `expected_bytes` for it, so that a full disk is found before anything is written.
  DirectWriter(std::string path, std::int64_t expected_bytes, const WriterOptions& options = {});
  ~DirectWriter();  ///< without finish(): what was written so far stays
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  void append(const void* data, std::size_t size);
  /// All of it is on the disk. \return the file's size.
  std::int64_t finish();
  bool is_direct() const { return direct_; }

 private:
  struct Buffer {
    std::byte* data = nullptr;
    std::size_t filled = 0;
  };
  void reserve(std::int64_t bytes);
  void submit();  ///< the buffer that is being filled goes to the thread; waits until the other one is free
  void run();
  void write_out(const std::byte* data, std::size_t size);
  void leave_direct();
  void stop();

  const std::string path_;
  const WriterOptions options_;
  Descriptor file_;
  bool direct_ = false;
  std::int64_t written_ = 0;
  std::unique_ptr<std::byte, void (*)(void*)> memory_;
  Buffer buffers_[2];
  int filling_ = 0;

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int pending_ = -1;  ///< the buffer the thread is to write or is writing
  bool ending_ = false;
  std::exception_ptr error_;
};

}  // namespace unshard::checkpoint
