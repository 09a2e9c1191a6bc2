#include "comm/text_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

namespace unshard::comm {

std::vector<std::string> exchange_texts(C10dTransport& transport, const Call& call, const std::string& mine, int size) {
  at::Tensor length = at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong), lengths = at::empty({size}, at::kLong);
  transport.all_gather(call, lengths, length);
  const std::int64_t* counts = lengths.const_data_ptr<std::int64_t>();
  const std::int64_t longest = *std::max_element(counts, counts + size);
  std::vector<std::string> all(static_cast<std::size_t>(size));
  if (longest == 0) return all;
  at::Tensor bytes = at::zeros({longest}, at::kByte), gathered = at::empty({longest * size}, at::kByte);
  std::memcpy(bytes.data_ptr(), mine.data(), mine.size());
  transport.all_gather(call, gathered, bytes);
  const char* from = static_cast<const char*>(gathered.const_data_ptr());
  for (int rank = 0; rank < size; ++rank)
    all[static_cast<std::size_t>(rank)].assign(from + rank * longest, static_cast<std::size_t>(counts[rank]));
  return all;
}

}  // namespace unshard::comm
