#pragma once
// What a RollCall and its thread tell each other, and how the threads of ranks speak.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/roll_call.h"
#include "comm/unique_fd.h"

namespace unshard::comm {

using RollClock = std::chrono::steady_clock;

inline constexpr auto kRollEvery = std::chrono::milliseconds(500);  ///< signs of life
inline constexpr double kRollSilent_s = 1.5;                        ///< then a rank counts as silent, in messages

/// Kinds of frames. To rank 0: greets, at a place, text of the next exchange, gives up, leaves. From it: news, texts of all, somebody
/// ended.
inline constexpr char kGreets = 'G', kAt = 'A', kText = 'T', kFails = 'F', kLeaves = 'L', kNews = 'N', kTexts = 'R', kEnded = 'X';

struct RollCall::State {
  State(c10::intrusive_ptr<c10d::Store> its_store, int its_rank, int its_size);

  const c10::intrusive_ptr<c10d::Store> store;
  const int rank, size;
  const UniqueFd bell;  ///< rung when there is something for the thread to do

  std::mutex mutex;
  std::condition_variable changed;
  // for the thread
  std::string place = "the meeting";
  std::optional<std::string> text;  ///< to be exchanged
  std::string failure;
  bool leaves = false, stop = false;
  // from the thread
  bool in_store = true;    ///< it can't be waited for
  bool said_last = false;  ///< what this rank had to say is on its way
  std::optional<std::vector<std::string>> texts;
  std::string ended, trouble;  ///< of another rank; of this one
  std::string news;            ///< who is missing
  RollClock::time_point heard = RollClock::now();

  void ring() const;
  void silence_bell() const;
  void tell_ended(std::string_view how);
  void tell_trouble(std::string_view what);
  void tell_said() {
    const std::lock_guard lock(mutex);
    said_last = true;
    changed.notify_all();
  }
  void set_in_store(bool is) {
    const std::lock_guard lock(mutex);
    in_store = is;
  }
  bool is_over() {
    const std::lock_guard lock(mutex);
    return leaves || stop || !failure.empty();
  }
};

/// "rank 2 gives no sign of life for 4.2 s, ..."
std::string silent_rank(int rank, double seconds, std::string_view place);

std::string pack_texts(const std::vector<std::string>& texts);
std::vector<std::string> unpack_texts(const std::string& packed);

/// What the threads do: rank 0's, and any other's.
void run_roll_hub(RollCall::State& state);
void run_roll_member(RollCall::State& state);

}  // namespace unshard::comm
