"""Clipping gradients that are in `.grad`, of a model that may be sharded over model-parallel ranks."""
import math

import torch
import torch.distributed as dist


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
    """Scale the gradients so that their common norm is at most `max_norm`; returns a tensor, the norm before over all model-parallel ranks.

    An engine's gradients aren't in `.grad`: those it clips itself (gradient_clipping).
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm_type, parallel = float(norm_type), mpu is not None and mpu.get_model_parallel_world_size() > 1
    if norm_type == math.inf:
        norm = max((g.detach().abs().max() for g in gradients if g.numel()), default=torch.zeros(()))
        norm = norm.float()
    else:
        mine = [p.grad for p in parameters if p.grad is not None and (not parallel or getattr(p, "model_parallel", False)
                                                                      or mpu.get_model_parallel_rank() == 0)]
        norm = sum((g.detach().float().norm(norm_type) ** norm_type for g in mine), torch.zeros(()))
    if parallel:
        dist.all_reduce(norm, dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM, group=mpu.get_model_parallel_group())
    if norm_type != math.inf:
        norm = norm ** (1 / norm_type)
    factor = float(max_norm) / (float(norm) + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
