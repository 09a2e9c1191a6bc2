#pragma once
// Files read and written while the caller does something else: by io_uring and past the page cache (O_DIRECT) where the system has them,
// by a few threads and through the cache where it hasn't. Which it is, is found at run time and told by describe().
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace unshard::offload {

/// A file can't be opened, or a transfer failed. The message names file, offset and the system's reason.
struct FileError : std::runtime_error {
  FileError(const std::string& what, int code) : std::runtime_error(what), code(code) {}
  int code;  ///< errno's; 0: the file ended early
};

enum class Access { read, write };  ///< write: reads too, and creates the file where there is none

/// An open file. Transfers under way keep it open, whatever becomes of this object. Any thread; open and close it on one.
class AsyncFile {
 public:
  /// \param direct  past the page cache where the file system can; false: through it in any case
  /// \throws FileError
  AsyncFile(const std::string& path, Access access, bool direct = true);
  AsyncFile() = default;  ///< closed, as after close()

  const std::string& path() const;
  bool is_open() const { return held_ != nullptr; }
  /// Later transfers are refused; those under way go on.
  void close() { held_.reset(); }
  std::int64_t bytes() const;  ///< as it is now. \throws FileError
  /// Set aside space for a file of this size, so that a full disk is found before anything is written. \throws FileError
  void reserve(std::int64_t bytes) const;
  void resize(std::int64_t bytes) const;  ///< zeros where it grows. \throws FileError
  /// What was written before is on the disk when this returns. \throws FileError
  void sync() const;
  /// "past the page cache", or "through the page cache" with the reason.
  std::string describe() const;

  struct Held;
  const std::shared_ptr<Held>& held() const { return held_; }

 private:
  const Held& opened() const;
  std::shared_ptr<Held> held_;
};

enum class Method { automatic, uring, threads };

struct AsyncOptions {
  Method method = Method::automatic;                 ///< automatic: io_uring where the system permits it, else threads
  std::int64_t queue_depth = 32;                     ///< pieces under way at once; the others wait in order
  std::int64_t piece_bytes = std::int64_t{1} << 20;  ///< a longer request is cut into pieces of this; a multiple of 4096
  std::int64_t threads = 4;                          ///< of Method::threads
  /// \throws std::invalid_argument naming the option, its value and what is accepted
  void validate() const;
};

/// Requests that are carried out in the background, in no promised order: wait for a write before what it wrote is read. Any thread.
class AsyncQueue {
 public:
  using Ticket = std::int64_t;

  /// \throws std::invalid_argument; FileError where Method::uring is asked for and not permitted
  explicit AsyncQueue(const AsyncOptions& options = {});
  /// As cancel_all(): buffers may be freed once it returns.
  ~AsyncQueue();
  AsyncQueue(const AsyncQueue&) = delete;
  AsyncQueue& operator=(const AsyncQueue&) = delete;

  /// Exactly `bytes` from `offset`; a file that ends before is an error. `buffer` stays untouched by others until the ticket is done.
  /// Fast where offset, bytes and buffer are multiples of 4096 (AlignedBuffer); an unaligned tail goes through the page cache.
  /// \throws std::invalid_argument  the file is closed, or a negative number
  Ticket read(const AsyncFile& file, std::int64_t offset, std::int64_t bytes, void* buffer);
  Ticket write(const AsyncFile& file, std::int64_t offset, std::int64_t bytes, const void* buffer);

  /// Until it is done. Once a ticket. \throws FileError what failed; std::invalid_argument a ticket that isn't there (any more)
  void wait(Ticket ticket);
  bool done(Ticket ticket) const;
  /// Until all are done; their tickets are gone. \throws FileError the first that failed
  void wait_all();
  /// What the system hasn't begun is dropped, what it has is waited for; wait() of these tickets throws.
  void cancel_all();

  /// "io_uring, 32 pieces of 1024 KiB at once", or "4 threads" with the reason.
  std::string describe() const;

  struct Impl;
  explicit AsyncQueue(std::unique_ptr<Impl> impl);  ///< for tests

 private:
  std::unique_ptr<Impl> impl_;
};

/// Memory for direct transfers: begins at a page, in huge pages where it is large and the system has them.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  /// \throws std::bad_alloc
  explicit AlignedBuffer(std::int64_t bytes);
  std::byte* data() const { return data_.get(); }
  std::int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::int64_t bytes_ = 0;
};

inline constexpr std::int64_t kBlock = 4096;  ///< no disk asks for coarser alignment than a page
constexpr std::int64_t whole_blocks(std::int64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

}  // namespace unshard::offload
