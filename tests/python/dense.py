"""The dense reference: one process, plain PyTorch, the mean gradient over the data of all ranks."""
import torch


def batch(rank, step, n=4, d=8):
    """Another batch for every rank and step, the same on every machine run."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, d, generator=g), torch.randn(n, d, generator=g)


def accumulate_mean_gradient(model, losses):
    """`losses`: one callable a rank, module -> loss. Leaves the mean gradient in .grad (None where no rank used the parameter)."""
    for p in model.parameters():
        p.grad = None
    for loss in losses:
        (loss(model) / len(losses)).backward()


def config(stage, **more):
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    zero = {**base["zero_optimization"], **more.pop("zero", {})}
    return {**base, **more, "zero_optimization": zero}


def weights(engine, model):
    """Full fp32 weights by name, as plain tensors."""
    import unshard
    return {k: unshard.safe_get_full_fp32_param(p).clone().float() for k, p in model.named_parameters()}


def close(a, b, tol=1e-5):
    worst = max((x - y).abs().max().item() if x.numel() else 0.0 for x, y in zip(a, b))
    assert worst <= tol, f"differs by {worst}"


def hex_of(tensors):
    """Exact bits, for comparing runs with each other."""
    import hashlib
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().float().contiguous().numpy().tobytes())
    return h.hexdigest()
