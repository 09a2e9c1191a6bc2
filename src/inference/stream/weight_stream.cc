#include "inference/stream/weight_stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "inference/stream/checksum.h"
#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {

WeightStream::WeightStream(std::vector<Unit> units, const ResidencyPlan& plan, offload::AsyncFile file, std::vector<StoredUnit> stored,
                           std::unique_ptr<offload::AsyncQueue> queue)
    : units_(std::move(units)),
      stored_(std::move(stored)),
      file_(std::move(file)),
      slots_(static_cast<std::size_t>(plan.slots)),
      queue_(queue ? std::move(queue) : std::make_unique<offload::AsyncQueue>()) {
  for (std::size_t i = 0; i < units_.size(); ++i)
    kept_.push_back(plan.stays[i] ? offload::AlignedBuffer(units_[i].bytes) : offload::AlignedBuffer());
  for (auto& slot : slots_) slot.memory = offload::AlignedBuffer(plan.slot_bytes);
  end_ = this->units();
}

WeightStream::~WeightStream() = default;

WeightStream::Slot* WeightStream::slot_of(std::int64_t unit) {
  const auto at = std::ranges::find(slots_, unit, &Slot::unit);
  return at == slots_.end() ? nullptr : &*at;
}

std::uint8_t* WeightStream::memory_of(std::int64_t unit) {
  const auto& kept = kept_[static_cast<std::size_t>(unit)];
  return reinterpret_cast<std::uint8_t*>(kept.bytes() > 0 ? kept.data() : slot_of(unit)->memory.data());
}

void WeightStream::read_into(Slot& slot, std::int64_t unit) {
  const auto at = static_cast<std::size_t>(unit);
  if (slot.ticket) {  // of a unit that is skipped: whether it could be read matters to nobody
    try {
      queue_->wait(*std::exchange(slot.ticket, std::nullopt));
    } catch (const offload::FileError&) {
    }
  }
  slot.unit = unit;
  slot.ticket = queue_->read(file_, stored_[at].offset, units_[at].bytes, slot.memory.data());
  bytes_read_ += units_[at].bytes;
}

/// The slots hold the first streamed units from `unit` on, in the order in which passes use them, or begin to read them.
void WeightStream::aim(std::int64_t unit) {
  wanted_.clear();
  for (std::int64_t step = 0; step < end_ && wanted_.size() < slots_.size(); ++step) {
    const std::int64_t next = (unit + step) % end_;
    if (kept_[static_cast<std::size_t>(next)].bytes() == 0) wanted_.push_back(next);
  }
  for (const auto next : wanted_) {
    if (slot_of(next)) continue;
    const auto free =
        std::ranges::find_if(slots_, [&](const Slot& slot) { return std::ranges::find(wanted_, slot.unit) == wanted_.end(); });
    read_into(*free, next);
  }
}

void WeightStream::arrive(Slot& slot) {
  if (!slot.ticket) return;
  const auto before = std::chrono::steady_clock::now();
  try {
    queue_->wait(*std::exchange(slot.ticket, std::nullopt));
  } catch (const offload::FileError& error) {
    slot.unit = -1;
    throw ModelError(cat("packed weights can't be read: ", error.what()));
  }
  wait_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
}

void WeightStream::use(std::int64_t unit) {
  UNSHARD_DCHECK(unit >= 0 && unit < end_, "unit ", unit, " of a pass of ", end_);
  aim(unit);
  if (kept_[static_cast<std::size_t>(unit)].bytes() > 0) return;
  arrive(*slot_of(unit));
  units_[static_cast<std::size_t>(unit)].place(memory_of(unit));
}

void WeightStream::end() {
  end_ = units();
  aim(0);
}

std::vector<std::int64_t> WeightStream::check() {
  std::vector<std::int64_t> damaged;
  begin(units());
  for (std::int64_t i = 0; i < units(); ++i) {
    const auto& unit = units_[static_cast<std::size_t>(i)];
    const auto& stored = stored_[static_cast<std::size_t>(i)];
    if (const auto& kept = kept_[static_cast<std::size_t>(i)]; kept.bytes() > 0) {
      try {
        queue_->wait(queue_->read(file_, stored.offset, unit.bytes, kept.data()));
      } catch (const offload::FileError& error) {
        throw ModelError(cat("packed weights can't be read: ", error.what()));
      }
      unit.place(memory_of(i));
    } else {
      use(i);
    }
    if (checksum(memory_of(i), static_cast<std::size_t>(unit.bytes)) != stored.checksum) damaged.push_back(i);
  }
  end();
  bytes_read_ = 0;
  wait_s_ = 0;
  return damaged;
}

std::string WeightStream::describe() const {
  std::int64_t kept = 0, kept_bytes = 0, all_bytes = 0;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    all_bytes += units_[i].bytes;
    if (kept_[i].bytes() > 0) ++kept, kept_bytes += units_[i].bytes;
  }
  return cat(kept, " of ", units_.size(), " parts of the weights (", kept_bytes >> 20, " of ", all_bytes >> 20,
             " MB) stay in memory; the others are read in each step from ", file_.path(), ", ", slots_.size(), " at hand (",
             queue_->describe(), ", ", file_.describe(), ")");
}

}  // namespace unshard::inference
