"""Adam under DeepSpeed's names."""
from unshard import optim


class FusedAdam(optim.Adam):
    """Adam (AdamW unless adam_w_mode is false)."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0,
                 amsgrad=False, set_grad_none=True):
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, adam_w_mode, amsgrad)


class DeepSpeedCPUAdam(optim.Adam):
    """The same; its state is fp32."""

    def __init__(self, model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False,
                 adamw_mode=True, fp32_optimizer_states=True):
        if not fp32_optimizer_states:
            raise ValueError("[DeepSpeedCPUAdam] fp32_optimizer_states=False isn't supported; leave it out")
        super().__init__(model_params, lr, betas, eps, weight_decay, bias_correction, adamw_mode, amsgrad)


__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
