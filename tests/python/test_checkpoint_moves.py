"""A run of DeepSpeed's moves over in the middle: its checkpoint, loaded into an engine, is the state that DeepSpeed itself says it is."""
import importlib.util
import pathlib

import deepspeed_checkpoints as recorded
import pytest
import torch
from ranks import run_ranks

import unshard

CASES = [v for v in recorded.VARIANTS if v not in ("stage0-fp16", "stage0-bf16")]     # those count a step that no one took


def maker():
    spec = importlib.util.spec_from_file_location("make_deepspeed_checkpoints", recorded.DATA / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def move(rank, world, folder, variants):
    make = maker()
    for variant in variants:
        place = pathlib.Path(folder, variant)
        expected = torch.load(place / "expected.pt", weights_only=False)
        stage, dtype, _, more = make.VARIANTS[variant]
        config = make.config_of((stage + 1 + world) % 4, dtype, {k: v for k, v in more.items() if k == "optimizer"})
        model, groups = make.model_and_groups()
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.fill_(7)
        engine = unshard.initialize(model=model, model_parameters=groups, config=config)[0]
        keywords = {"tag": "universal"} if "universal" in variant else {}
        if more.get("exclude_frozen"):                          # DeepSpeed's files don't say that something was left out
            with pytest.raises(unshard.CheckpointError, match="has no 'frozen.weight', 'frozen.bias'"):
                engine.load_checkpoint(place)
            keywords["load_module_strict"] = False
        path, client = engine.load_checkpoint(place, **keywords)
        assert path and client == {"epoch": 2, "note": "mine", "seen": [1, 2, (3,)]}, (variant, client)
        assert [engine.global_steps, engine.global_samples, engine.skipped_steps] == [
            expected[key] for key in ("global_steps", "global_samples", "skipped_steps")]
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert torch.equal(unshard.safe_get_full_fp32_param(p), expected["fp32"][name].float()), (variant, name)
                for state in ("momentum_buffer",) if "optimizer" in more else ("exp_avg", "exp_avg_sq"):
                    wanted = expected[state][name]
                    assert torch.equal(unshard.safe_get_full_optimizer_state(p, state), wanted.float()), (variant, name, state)
        if expected["loss_scale"] is not None:
            assert engine.loss_scale() == expected["loss_scale"]
        if expected["lr_scheduler"] is not None:
            assert engine.lr_scheduler.state_dict()["last_batch_iteration"] == expected["lr_scheduler"]["last_batch_iteration"]
        tokens = torch.arange(8).reshape(2, 4) % 7
        engine.backward(engine(tokens, (tokens + 1) % 7))
        engine.step()
        assert engine.global_steps == expected["global_steps"] + 1
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_every_recorded_checkpoint_loads_into_an_engine_of_another_stage(world, tmp_path):
    for variant in CASES:
        recorded.unpack(variant, tmp_path / variant)
    run_ranks(world, move, str(tmp_path), CASES)
