"""Export to DeepSpeed's universal layout: it reads back with the same values, from DeepSpeed's folders and ours, and the real DeepSpeed
loads it at other world sizes and stages and goes on."""
import json
import os
import pathlib
import subprocess
import sys

import deepspeed_checkpoints as recorded
import pytest
import torch
from native_checkpoint import write_native
from unshard import CheckpointError
from unshard.checkpoint.opening import open_checkpoint
from unshard.checkpoint.universal import export_universal, main

PEER = os.environ.get("UNSHARD_PEERS_PYTHON", "")


def write(save_dir, dtype="fp32", scaler=None):
    torch.manual_seed(3)
    weights = {"embed.weight": torch.randn(7, 5), "frozen.weight": torch.randn(5, 5), "frozen.bias": torch.randn(5),
               "mid.weight": torch.randn(5, 5), "mid.bias": torch.randn(5), "norm.weight": torch.rand(5), "norm.bias": torch.randn(5)}
    states = {"exp_avg": {name: torch.randn(value.shape) * 0.1 for name, value in weights.items()},
              "exp_avg_sq": {name: torch.rand(value.shape) * 0.1 for name, value in weights.items()}}
    more = {"loss_scaler": scaler} if scaler else {}
    state = {"buffers": {"scale": torch.tensor([0.5, 1.5])}, "client_state": {"epoch": 2, "t": torch.arange(3)},
             "lr_scheduler": {"last_batch_iteration": 3}}
    return write_native(str(save_dir), weights, states, frozen=["frozen.weight", "frozen.bias"], shared={"head.weight": "embed.weight"},
                        python_state=state, dtype=dtype, ranks=2, **more)


def same_values(a, b):
    assert a.names() == b.names() and a.shared == b.shared
    for name in a.names():
        assert torch.equal(a.weight(name).float(), b.weight(name).float()), name
        assert a.parameters[name]["group"] == b.parameters[name]["group"] and a.parameters[name]["steps"] == b.parameters[name]["steps"]
        assert a.parameters[name]["dtype"] == b.parameters[name]["dtype"], name
        for kind in set(a.parameters[name]["kinds"]) - {"param", "fp32"}:
            assert torch.equal(a.read(kind, name), b.read(kind, name)), (kind, name)
    assert a.contents["counters"] == b.contents["counters"] and a.contents["optimizer"] == b.contents["optimizer"]
    one, two = a.python_state(), b.python_state()
    assert one["lr_scheduler"] == two["lr_scheduler"] and list(one["client_state"]) == list(two["client_state"])
    assert all(torch.equal(two["buffers"][name], value) for name, value in one["buffers"].items())
    options = ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum")
    for first, second in zip(a.contents["groups"], b.contents["groups"], strict=True):
        assert {key: first[key] for key in options if first.get(key)} == {key: second[key] for key in options if second.get(key)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_native_checkpoint_reads_back_from_its_universal_folder(tmp_path, dtype):
    scaler = {"scale": 64.0, "iteration": 9, "last_overflow": 4, "hysteresis_left": 1} if dtype == "fp16" else None
    source = open_checkpoint(write(tmp_path, dtype, scaler))
    seen = []
    export_universal(source, tmp_path / "u" / "tag", progress=lambda *step: seen.append(step))
    back = open_checkpoint(tmp_path / "u")
    same_values(source, back)
    assert back.contents.get("loss_scaler") == scaler
    assert seen[-1][0] == seen[-1][1] and [step[0] for step in seen] == sorted(step[0] for step in seen)
    assert sorted(os.listdir(tmp_path / "u" / "tag" / "zero")) == [
        "embed.weight", "mid.bias", "mid.weight", "norm.bias", "norm.weight", "optimizer_state.pt"]
    assert sorted(os.listdir(tmp_path / "u" / "tag" / "zero" / "mid.bias")) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
    back.verify()


@pytest.mark.parametrize("variant", ["stage0-bf16", "stage1-bf16", "stage2-fp32", "stage2-sgd", "stage3-fp32", "stage3-subgroups"])
def test_deepspeed_checkpoints_convert_as_deepspeed_converts_them(tmp_path, variant):
    folder, _ = recorded.unpack(variant, tmp_path)
    assert main(["--input_folder", folder, "--output_folder", str(tmp_path / "uni" / "tag")]) == 0
    assert (tmp_path / "uni" / "latest_universal").read_text() == "tag"
    source, back = open_checkpoint(folder), open_checkpoint(tmp_path / "uni")
    if "stage0" not in variant:              # whose step count is one more than the engine's
        same_values(source, back)
    files = sorted(path.name for path in (tmp_path / "uni" / "tag" / "zero" / "mid.bias").iterdir())
    assert ("step.pt" in files) == ("stage3" not in variant) and "fp32.pt" in files


def test_a_folder_that_is_something_else_is_left_alone_and_a_failed_export_leaves_nothing(tmp_path, capsys):
    folder = write(tmp_path / "c")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    assert main(["--input_folder", folder, "--output_folder", str(tmp_path / "mine")]) == 1
    assert "isn't a universal checkpoint" in capsys.readouterr().err and (tmp_path / "mine" / "precious").exists()
    os.truncate(os.path.join(folder, "state.safetensors"), os.path.getsize(os.path.join(folder, "state.safetensors")) - 1)
    assert main(["--input_folder", folder, "--output_folder", str(tmp_path / "u" / "t")]) == 1
    source = open_checkpoint(write(tmp_path / "d"))
    data = pathlib.Path(source.folder, "state.json")
    data.write_text(data.read_text().replace("epoch", "epoxh"))
    with pytest.raises(CheckpointError, match=r"state\.json"):
        export_universal(source, tmp_path / "u" / "t")
    assert not (tmp_path / "u").exists() or not os.listdir(tmp_path / "u")


# A rank of the real DeepSpeed: loads the universal folder, says what it holds, makes a step.
_PEER_RANK = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import make
import deepspeed, torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
get_accelerator().is_fp16_supported = lambda: True
stage, dtype = int(sys.argv[3]), sys.argv[4]
model, groups = make.model_and_groups()
config = make.config_of(stage, dtype, {})
config["checkpoint"] = {"load_universal": True}
engine, optimizer, _, schedule = deepspeed.initialize(model=model, model_parameters=groups, config=config)
path, client = engine.load_checkpoint(sys.argv[2])
if hasattr(optimizer, "_hp_optimizer_states_linked"):
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()
values = {}
for name, p in model.named_parameters():
    if p.requires_grad:
        values[name] = [safe_get_full_fp32_param(p).flatten().tolist()] + [
            safe_get_full_optimizer_state(p, key).flatten().tolist() for key in ("exp_avg", "exp_avg_sq")]
steps = sorted({float(state["step"]) for state in optimizer.optimizer.state.values()})
tokens = torch.arange(8).reshape(2, 4) % 7
engine.backward(engine(tokens, (tokens + 1) % 7))
engine.step()
if engine.global_rank == 0:
    print("SAID " + json.dumps([values, steps, engine.global_steps, engine.skipped_steps, schedule.state_dict(), client["epoch"],
                                float(getattr(optimizer, "cur_scale", 0) or optimizer.loss_scaler.cur_scale)]))
"""


@pytest.mark.skipif(not PEER, reason="UNSHARD_PEERS_PYTHON names no Python with the real DeepSpeed")
@pytest.mark.parametrize("stage, dtype, ranks", [(2, "fp32", 1), (1, "bf16", 2), (3, "bf16", 2), (2, "fp16", 2)])
def test_the_real_deepspeed_loads_it(tmp_path, stage, dtype, ranks):
    scaler = {"scale": 32.0, "iteration": 9, "last_overflow": 4, "hysteresis_left": 1} if dtype == "fp16" else None
    source = open_checkpoint(write(tmp_path / "c", dtype, scaler))
    export_universal(source, tmp_path / "u" / "tag")
    sys.path.insert(0, str(recorded.DATA))
    try:
        import make
    finally:
        sys.path.remove(str(recorded.DATA))
    environment = dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(make.free_port()))
    processes = [subprocess.Popen([PEER, "-c", _PEER_RANK, str(recorded.DATA), str(tmp_path / "u"), str(stage), dtype], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(environment, RANK=str(r), LOCAL_RANK=str(r)))
                 for r in range(ranks)]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-3000:]
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("SAID "))
    values, steps, global_steps, skipped, schedule, epoch, scale = json.loads(line.removeprefix("SAID "))
    assert len(values) == 5
    for name, (weight, *states) in values.items():
        assert weight == source.weight(name).flatten().tolist(), name
        assert states == [source.read(kind, name).tolist() for kind in ("exp_avg", "exp_avg_sq")], name
    assert steps == [4.0] and global_steps == 5 and skipped == 0 and epoch == 2 and schedule == {"last_batch_iteration": 4}
    assert dtype != "fp16" or scale == 32.0
