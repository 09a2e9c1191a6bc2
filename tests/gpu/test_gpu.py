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


def test_inference_of_every_family_is_transformers(tmp_path):
    pytest.importorskip("transformers")
    from inference_models import FAMILIES, save_tiny
    from test_inference import logits_of

    from unshard import _core
    for family in FAMILIES:
        model = save_tiny(family, tmp_path / family)
        tokens = torch.randint(3, model.config.vocab_size, (200,), generator=torch.Generator().manual_seed(1)).tolist()
        with torch.no_grad():
            wanted = model(torch.tensor([tokens])).logits[0]
        for step_tokens in (512, 7):
            engine = _core.InferenceEngine(str(tmp_path / family), {"device": "cuda", "dtype": "fp32", "threads": 1, "kv_cache_tokens": 512,
                                                                    "step_tokens": step_tokens})
            assert (logits_of(engine, tokens) - wanted).abs().max() < 1e-4, (family, step_tokens)
            engine.close()


def test_an_injected_module_generates_what_it_generated(tmp_path):
    pytest.importorskip("transformers")
    import deepspeed
    from inference_models import save_tiny
    model = save_tiny("llama", tmp_path).cuda()
    prompt = torch.randint(3, 250, (2, 20), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    engine = deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    got = engine.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert got.device == wanted.device and torch.equal(got, wanted)
    engine.destroy()
