"""LAMB under DeepSpeed's names."""
from unshard import optim


class FusedLamb(optim.Lamb):
    """LAMB."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False, weight_decay=0.0,
                 max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False):
        if max_grad_norm:
            raise ValueError(f"[FusedLamb] max_grad_norm={max_grad_norm!r}: set \"gradient_clipping\" in the configuration instead")
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt, min_coeff, max_coeff, amsgrad)


__all__ = ["FusedLamb"]
