"""Lion under DeepSpeed's names."""
from unshard import optim


class FusedLion(optim.Lion):
    """Lion."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True):
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(optim.Lion):
    """Lion."""

    def __init__(self, model_params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0, fp32_optimizer_states=True):
        if not fp32_optimizer_states:
            raise ValueError("[DeepSpeedCPULion] fp32_optimizer_states=False isn't supported; leave it out")
        super().__init__(model_params, lr, betas, weight_decay)


__all__ = ["DeepSpeedCPULion", "FusedLion"]
