"""Adagrad under DeepSpeed's names."""
from unshard import optim


class DeepSpeedCPUAdagrad(optim.Adagrad):
    """Adagrad."""

    def __init__(self, model_params, lr=1e-2, eps=1e-10, weight_decay=0, amsgrad=False, fp32_optimizer_states=True):
        if amsgrad or not fp32_optimizer_states:
            raise ValueError("[DeepSpeedCPUAdagrad] amsgrad and fp32_optimizer_states=False aren't supported; leave them out")
        super().__init__(model_params, lr, 0.0, weight_decay, 0.0, eps)


__all__ = ["DeepSpeedCPUAdagrad"]
