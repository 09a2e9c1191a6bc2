"""The engine on a GPU: the same numbers as the dense model on that GPU. Skipped, saying so, where there is none."""
import pathlib
import sys

import pytest
import torch
import torch.nn as nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine: the GPU suite was not run")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_equals_dense(stage, dtype):
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
    twin = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
    twin.load_state_dict(model.state_dict())
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "bf16": {"enabled": dtype is torch.bfloat16},
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(5):
        x = torch.randn(4, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        engine.backward(engine(x.to(dtype)).float().pow(2).mean())
        engine.step()
        optimizer.zero_grad()
        twin(x).pow(2).mean().backward()
        optimizer.step()
    tol = 1e-5 if dtype is torch.float32 else 3e-2
    for p, q in zip(model.parameters(), twin.parameters()):
        assert (unshard.safe_get_full_fp32_param(p).float() - q).abs().max() <= tol
    engine.destroy()


def test_touch_costs_no_copy_on_one_gpu():
    import unshard
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024).cuda()
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(10):
            model(torch.ones(1, 1024, device="cuda"))
    assert torch.cuda.memory_allocated() - before < 1024 * 1024
    engine.destroy()
