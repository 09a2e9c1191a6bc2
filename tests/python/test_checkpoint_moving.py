"""A run moves over from DeepSpeed in mid-training: loaded at other stages, world sizes and dtypes it goes on with DeepSpeed's own losses
and weights; and what the engine saves is what the tools read."""
import sys

import deepspeed_checkpoints as recorded
import pytest
import torch
from ranks import run_ranks

# relative and absolute, by the lower precision of the two runs
TOLERANCE = {"fp32": (1e-5, 1e-6), "bf16": (2e-2, 4e-3), "fp16": (5e-3, 1e-3)}


def make():
    sys.path.insert(0, str(recorded.DATA))
    try:
        import make
        return make
    finally:
        sys.path.remove(str(recorded.DATA))


def batch(recipe, step, world, ranks_then, rank):
    """This rank's part of the batch that `ranks_then` ranks had."""
    rows = [torch.cat(part) for part in zip(*(recipe.batch_of(step, then) for then in range(ranks_then)))]
    share = len(rows[0]) // world
    return [part[rank * share:(rank + 1) * share] for part in rows]


def go_on(rank, world, place, cases):
    return [go_on_one(rank, world, f"{place}/{variant}", variant, stage, dtype) for variant, stage, dtype in cases]


def go_on_one(rank, world, folder, variant, stage, dtype):
    """Load, train as DeepSpeed did after it saved: (losses, weights)."""
    import deepspeed
    recipe = make()
    _, _, ranks_then, more = recipe.VARIANTS[variant]
    strict = "nofrozen" not in variant
    model, groups = recipe.model_and_groups()
    with torch.no_grad():                                  # nothing that is loaded is right by chance
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.requires_grad or strict else 1.0)
        model.scale.zero_()
    config = recipe.config_of(stage, dtype, {key: value for key, value in more.items() if key in ("optimizer", "sub_group_size")})
    config["train_micro_batch_size_per_gpu"] = 2 * ranks_then // world
    config["checkpoint"] = {"load_universal": "universal" in variant}
    engine, _, _, schedule = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    path, client = engine.load_checkpoint(folder, tag="universal" if "universal" in variant else None, load_module_strict=strict)
    assert path and client["epoch"] == 2 and client["seen"] == [1, 2, (3,)]
    assert (engine.global_steps, engine.global_samples) == (4, 8 * ranks_then) and schedule.last_batch_iteration == 3
    assert model.scale.tolist() == [0.5, 1.5]
    losses = []
    for step in range(recipe.STEPS, recipe.STEPS + recipe.MORE_STEPS):
        tokens, targets = batch(recipe, step, world, ranks_then, rank)
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / world)
    weights = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().float().tolist()
    engine.destroy()
    return losses, weights


# {world now: [(saved by DeepSpeed, stage now, dtype now)]}
CASES = {
    1: [("stage0-bf16", 3, "bf16"), ("stage1-bf16-fp32grads", 2, "bf16"), ("stage2-fp32", 3, "fp32"), ("stage2-sgd", 3, "fp32"),
        ("stage3-bf16", 0, "bf16"), ("stage3-universal", 1, "bf16"), ("stage2-bf16", 3, "fp32")],
    2: [("stage0-fp16", 1, "fp16"), ("stage1-fp32", 0, "fp32"), ("stage1-bf16", 3, "bf16"), ("stage2-fp16", 3, "fp16"),
        ("stage2-bf16", 1, "bf16"), ("stage3-offload", 2, "fp32"), ("stage3-nofrozen", 3, "fp32"), ("stage3-bf16", 2, "bf16")],
    3: [("stage3-fp32", 1, "fp32")],
    4: [("stage0-fp32", 2, "fp32"), ("stage2-offload", 3, "fp32"), ("stage3-subgroups", 0, "fp32"), ("stage2-universal", 3, "fp32")],
}


@pytest.mark.parametrize("world", CASES)
def test_a_deepspeed_run_goes_on_with_its_own_losses(tmp_path, world):
    expected = {variant: recorded.unpack(variant, tmp_path / variant)[1] for variant, _, _ in CASES[world]}
    results = run_ranks(world, go_on, str(tmp_path), CASES[world], limit=200)
    for of_rank in results:
        for (variant, stage, dtype), (losses, weights) in zip(CASES[world], of_rank, strict=True):
            lower = "bf16" if "bf16" in variant or variant == "stage3-universal" else dtype
            relative, absolute = TOLERANCE[lower]
            case = f"{variant} at stage {stage} in {dtype}"
            if variant == "stage0-fp16":         # DeepSpeed divides by the loss scale after it has doubled it, in the steps where it does
                assert losses[0] == pytest.approx(expected[variant]["next_losses"][0], rel=1e-5)
                assert losses == pytest.approx(expected[variant]["next_losses"], rel=1e-2)
                continue
            assert losses == pytest.approx(expected[variant]["next_losses"], rel=relative), case
            for name, wanted in expected[variant]["next"].items():
                torch.testing.assert_close(torch.tensor(weights[name]), wanted, rtol=relative, atol=absolute,
                                           msg=lambda text: f"{case}, {name}: {text}")


def save(rank, world, folder, stage, dtype, freeze):
    """A few steps, a save, and the whole values as the engine's own access has them."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    recipe = make()
    model, groups = recipe.model_and_groups()
    model.register_buffer("cache", torch.ones(3), persistent=False)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=recipe.config_of(stage, dtype, {}))
    recipe.train_steps(engine, range(3))
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values[name] = [safe_get_full_fp32_param(parameter).tolist()] + [
                safe_get_full_optimizer_state(parameter, key).tolist() for key in ("exp_avg", "exp_avg_sq")]
    engine.save_checkpoint(folder, client_state={"epoch": 2}, exclude_frozen_parameters=freeze)
    return values


@pytest.mark.parametrize("world, stage, dtype, freeze", [(2, 3, "fp32", False), (3, 2, "bf16", False), (2, 1, "fp32", True),
                                                         (1, 0, "bf16", False)])
def test_what_the_engine_saves_is_what_the_tools_read(tmp_path, capsys, world, stage, dtype, freeze):
    from unshard.checkpoint import zero_to_fp32_script
    from unshard.checkpoint.cli import main
    from unshard.checkpoint.opening import open_checkpoint
    values = run_ranks(world, save, str(tmp_path / "c"), stage, dtype, freeze)[0]
    assert (tmp_path / "c" / "zero_to_fp32.py").exists() == (stage > 0)
    source = open_checkpoint(tmp_path / "c")
    source.verify()
    for name, (weight, *states) in values.items():
        assert source.weight(name).tolist() == weight
        assert [source.read(kind, name).reshape(source.shape(name)).tolist() for kind in ("exp_avg", "exp_avg_sq")] == states
    assert source.contents["counters"]["global_steps"] == 3 and source.python_state()["client_state"] == {"epoch": 2}
    assert ("frozen.weight" in source.names()) == (not freeze)
    wanted = {"scale", "embed.weight", "head.weight", "mid.weight", "mid.bias", "norm.weight", "norm.bias"}
    wanted |= set() if freeze else {"frozen.weight", "frozen.bias"}
    for state in (zero_to_fp32_script.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "c")),
                  zero_to_fp32_script.lazy_state_dict(source)):
        assert set(state) == wanted
        assert all(state[name].contiguous().tolist() == weight for name, (weight, *_) in values.items())
    assert main(["inspect", str(tmp_path / "c"), "--parameters"]) == 0 and main(["verify", str(tmp_path / "c")]) == 0
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "u" / "t"), "--to", "universal"]) == 0
    back = open_checkpoint(tmp_path / "u")
    assert all(back.weight(name).tolist() == weight for name, (weight, *_) in values.items())
