#include "inference/comm_peers.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {

constexpr std::int64_t kFirst = 256;  // words of the first message: a step of a few running sequences fits

class CommPeers : public Peers {
 public:
  explicit CommPeers(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)), first_(at::empty({kFirst}, at::kInt)) {}
  int rank() const override { return comm_->rank(); }
  int size() const override { return comm_->world_size(); }

  void all_reduce(float* values, std::int64_t count) override {
    auto tensor = at::from_blob(values, {count}, at::kFloat);
    comm_->all_reduce(tensor, ReduceOp::sum, "tensor parallelism");
  }

  /// The number of words and the first of them in one message; the rest, if any, in another.
  void broadcast(std::vector<std::int32_t>& words) override {
    auto* first = first_.mutable_data_ptr<std::int32_t>();
    if (rank() == 0) {
      first[0] = static_cast<std::int32_t>(words.size());
      std::copy_n(words.begin(), std::min<std::size_t>(words.size(), kFirst - 1), first + 1);
    }
    comm_->broadcast(first_, 0, "a step's tokens");
    words.resize(static_cast<std::size_t>(first[0]));
    if (rank() != 0) std::copy_n(first + 1, std::min<std::size_t>(words.size(), kFirst - 1), words.begin());
    const auto rest = static_cast<std::int64_t>(words.size()) - (kFirst - 1);
    if (rest <= 0) return;
    auto tail = at::from_blob(words.data() + kFirst - 1, {rest}, at::kInt);
    comm_->broadcast(tail, 0, "a step's tokens");
  }

  void fail(const char* reason) noexcept override {
    try {
      comm_->fail(reason);
    } catch (const std::exception&) {  // they find out by waiting
    }
  }

 private:
  std::shared_ptr<Communicator> comm_;
  at::Tensor first_;
};

}  // namespace

std::shared_ptr<Peers> peers_over(std::shared_ptr<Communicator> comm) { return std::make_shared<CommPeers>(std::move(comm)); }

/// Here and not beside the others: nothing else of the engine needs torch.
Engine::Engine(const std::string& path, const EngineOptions& options, std::shared_ptr<Communicator> comm, const ModelFactory& other_devices)
    : Engine(path, options, comm && comm->world_size() > 1 ? peers_over(std::move(comm)) : std::shared_ptr<Peers>(), other_devices) {}

}  // namespace unshard::inference
