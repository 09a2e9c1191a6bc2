#pragma once
// One-sided reads of other ranks' shards, for memory that isn't shared: a serving thread per rank answers, so the owner's main thread
// takes no part and ranks need not touch the same parameters. Bytes travel, never dtypes (complex and fp8 are fine).
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace unshard {

class Communicator;

class ShardService {
 public:
  /// This rank's piece of parameter `id` (real bytes, without padding), stable while it is read; called on the serving thread, must not
  /// wait. Nothing: this rank hasn't added it yet; the answer waits, other requests don't.
  using Lookup = std::function<std::optional<std::span<const std::byte>>(int id)>;

  /// Collective over `comm`, which is only needed for the start: bytes travel over TCP connections of the service's own. Starts the serving
  /// thread and reaches every peer once.
  /// \param nearby  ranks that are never asked: their pieces are here already (memory they share with this rank).
  /// \param moved  counted up whenever a fetch gets on; null: nobody asks.
  /// \throws CommError, on every rank, when some rank can't reach another.
  static std::unique_ptr<ShardService> start(Communicator& comm, Lookup lookup, const std::vector<int>& nearby = {},
                                             std::atomic<std::uint64_t>* moved = nullptr);
  virtual ~ShardService() = default;  ///< stops the thread; never hangs when peers are gone

  /// One parameter to bring in: the whole [padded] value is at `whole`; piece r goes to whole + r * shard_bytes; the padding is not
  /// written.
  struct Request {
    int id;
    std::byte* whole;
    std::size_t shard_bytes;  ///< bytes of a full piece; the last ones may be shorter
    std::size_t numel_bytes;  ///< bytes of the real whole value
  };
  /// Blocks until all asked ranks' pieces have arrived (own and nearby pieces are not copied). Requests of one call travel together: one
  /// message a peer. Any thread; concurrent calls allowed. \throws CommError peer gone or timed out, naming rank and parameter id.
  virtual void fetch(const std::vector<Request>& requests) = 0;
  virtual std::int64_t bytes_received() const = 0;
  virtual std::int64_t bytes_sent() const = 0;  ///< of this rank's pieces, to all who asked
};

}  // namespace unshard
