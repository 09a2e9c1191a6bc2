#pragma once
// Takes each gradient as autograd accumulates it. One post hook on the AccumulateGrad node of every trained parameter; the slot that
// torch gives to the user (register_post_accumulate_grad_hook) stays free, and the user's hooks run first.
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace unshard {

/// Receives gradients, from whichever thread autograd uses.
class GradientReceiver {
 public:
  virtual ~GradientReceiver() = default;
  virtual void on_gradient(int parameter, const at::Tensor& grad) = 0;
};

class GradientHooks {
 public:
  GradientHooks();
  ~GradientHooks();  ///< as detach()
  /// Watch `parameter` under `id`. Nothing is attached yet.
  void watch(int id, const at::Tensor& parameter);
  /// Attach to every watched parameter that requires a gradient and has no hook on its present accumulator: at start, after
  /// requires_grad was switched on, after its data was replaced by another dtype. Cheap when
  /// nothing changed.
  void refresh(const std::shared_ptr<GradientReceiver>& receiver);
  /// Take gradients that lie on parameters now (also of parameters without a hook).
  void collect(GradientReceiver& receiver);
  void detach();

 private:
  struct Watched;
  std::vector<Watched> watched_;
};

}  // namespace unshard
