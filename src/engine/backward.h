#pragma once
// What the engine knows of backward passes: whether one runs, how its loss was scaled, how long it took. Works for engine.backward(loss),
// engine.scale(loss).backward() and a plain loss.backward(), in any number before a step, on any thread.
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gradient_hooks.h"

namespace unshard {

class Communicator;
class GradientPipeline;

class Backward final : public GradientReceiver, public std::enable_shared_from_this<Backward> {
 public:
  /// \param names of parameters by id, for phases.
  Backward(GradientPipeline& pipeline, Communicator& comm, std::vector<std::string> names);

  /// Called by hooks, and for gradients found on parameters.
  void on_gradient(int parameter, const at::Tensor& grad) override;
  /// What a loss that did not go through the engine lacks: loss scale / accumulation steps.
  void set_missing_factor(double factor) { missing_factor_ = factor; }
  /// The pass that runs now started from a scaled loss.
  void mark_scaled();

  /// engine.backward: everything inside is scaled.
  class Scope {
   public:
    explicit Scope(Backward& backward);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Backward& backward_;
    std::chrono::steady_clock::time_point start_;
  };

  /// Passes that ended with an exception never said so: forget them. Called where no backward of this engine can be running.
  void forget_running();
  /// A step begins: the time of its passes, and then start anew.
  double take_ms();
  /// The same for their number.
  int take_passes();

 private:
  void enter_task();
  void leave_task(int task);
  bool is_scaled() const;

  GradientPipeline& pipeline_;
  Communicator& comm_;
  const std::vector<std::string> names_;
  mutable std::mutex mutex_;
  std::set<int> tasks_;       // autograd's graph tasks that run now and whose end will be reported
  bool task_scaled_ = false;  // the outermost running task started from engine.scale()
  bool last_scaled_ = true;   // for gradients found on parameters after the pass
  int scopes_ = 0, passes_ = 0;
  double missing_factor_ = 1, ms_ = 0;
  std::chrono::steady_clock::time_point started_;
};

}  // namespace unshard
