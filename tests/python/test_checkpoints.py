"""save_checkpoint and load_checkpoint: exact, at any world size, complete or absent."""
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import dense
import pytest
import torch
import torch.nn as nn
from ranks import free_port, rank_env, run_ranks

import unshard
from unshard.core import _core

SOAK = int(os.environ.get("UNSHARD_SOAK", "1")) > 1
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


class Net(nn.Module):
    """Odd sizes, a tied weight, a buffer, dropout on demand, a weight that lies transposed in memory."""

    def __init__(self, seed=1, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.turned, self.out = nn.Linear(8, 13), nn.Linear(13, 13), nn.Linear(13, 8)
        self.turned.weight = nn.Parameter(self.turned.weight.detach().t().contiguous().t())
        self.again = self.turned
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return self.out(self.dropout(torch.tanh(self.again(torch.tanh(self.turned(torch.tanh(self.inner(x)))))).to(x.dtype)))


def loss_of(engine, rank, step):
    x, y = dense.batch(rank, step)
    dtype = engine.inner.weight.dtype
    return ((engine(x.to(dtype)) - y.to(dtype)).float()**2).mean()


def train(engine, rank, start, end):
    losses = []
    for step in range(start, end):
        loss = loss_of(engine, rank, step)
        engine.backward(loss)
        engine.step()
        losses.append([loss.item(), *engine.get_lr()])
    return losses


def make(stage, seed=1, dropout=0.0, optimizer=ADAMW, client=None, schedule=None, **more):
    model = Net(seed, dropout)
    chosen = {"optimizer": client(model.parameters())} if client else {}
    if client is None:
        more["optimizer"] = optimizer
    if schedule is not None:
        chosen["lr_scheduler"] = schedule
    return unshard.initialize(model=model, config=dense.config(stage, **more), **chosen)[0]


def moments(engine):
    return {f"{name}/{key}": unshard.safe_get_full_optimizer_state(p, key).clone()
            for name, p in engine.module.named_parameters() for key in ("exp_avg", "exp_avg_sq")}


def values(engine):
    return {**dense.weights(engine, engine.module), **moments(engine)}


# ---- any world size, stage and dtype ---------------------------------------------------------------------------------
def save_some(rank, world, folder, dtypes):
    """One checkpoint a stage and dtype; every rank trains on the same batches, so that the world size makes no difference."""
    losses = {}
    for stage in range(4):
        for dtype in dtypes:
            engine = make(stage, **({"bf16": {"enabled": True}} if dtype == "bf16" else {}))
            train(engine, 0, 0, 3)
            engine.save_checkpoint(folder, tag=f"{stage}{dtype}", client_state={"stage": stage})
            kept = values(engine)
            if rank == 0:
                torch.save(kept, f"{folder}/{stage}{dtype}.values")
            losses[f"{stage}{dtype}"] = train(engine, 0, 3, 6)
            engine.destroy()
    return losses


def load_all(rank, world, folder, dtypes):
    losses = {}
    for saved in range(4):
        for dtype in dtypes:
            stage = (saved + world) % 4
            engine = make(stage, seed=5, **({"bf16": {"enabled": True}} if dtype == "bf16" else {}))
            path, client = engine.load_checkpoint(folder, tag=f"{saved}{dtype}")
            assert client == {"stage": saved} and path.endswith("manifest.json") and engine.module.seen.item() == 3
            want = torch.load(f"{folder}/{saved}{dtype}.values")
            got = values(engine)
            assert all(torch.equal(got[k], v) for k, v in want.items()), (saved, stage, dtype)
            losses[f"{saved}{dtype}"] = train(engine, 0, 3, 6)
            engine.destroy()
    return losses


def test_09_saved_at_two_ranks_it_goes_on_at_one_three_and_four_at_any_stage(tmp_path):
    want = run_ranks(2, save_some, str(tmp_path), ["fp32", "bf16"])[0]
    for world in (1, 3, 4):
        got = run_ranks(world, load_all, str(tmp_path), ["fp32", "bf16"])[0]
        for key, losses in want.items():
            worst = max(abs(a - b) for x, y in zip(losses, got[key]) for a, b in zip(x, y))
            assert worst <= 1e-5, (world, key, worst)


# ---- exact, with everything that a training has ----------------------------------------------------------------------
def _lambda_lr(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


SETTINGS = {
    "WarmupLR": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.1}}},
    "WarmupDecayLR": {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 10}}},
    "WarmupCosineLR": {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 10}}},
    "OneCycle": {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}}},
    "LRRangeTest": {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.01}}},
    "LambdaLR": {"schedule": _lambda_lr}, "torch's OneCycleLR": {"schedule": _one_cycle},
    "NAdam": {"client": lambda p: torch.optim.NAdam(p, lr=0.01)}, "ASGD": {"client": lambda p: torch.optim.ASGD(p, lr=0.01)},
    "RMSprop": {"client": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def straight(rank, world, stage, folder):
    results = {}
    for name, settings in SETTINGS.items():
        engine = make(stage, dropout=0.3, **settings)
        torch.manual_seed(100 + rank)
        random.seed(rank)
        train(engine, rank, 0, 4)
        engine.save_checkpoint(f"{folder}/{name}", client_state={"name": name})
        results[name] = [train(engine, rank, 4, 8), dense.hex_of(dense.weights(engine, engine.module).values()), engine.loss_scale(),
                         random.random(), engine.micro_steps]
        engine.destroy()
    return results


def resumed(rank, world, stage, folder):
    results = {}
    for name, settings in SETTINGS.items():
        engine = make(stage, seed=9, dropout=0.3, **settings)
        _, client = engine.load_checkpoint(f"{folder}/{name}")
        assert client == {"name": name}
        results[name] = [train(engine, rank, 4, 8), dense.hex_of(dense.weights(engine, engine.module).values()), engine.loss_scale(),
                         random.random(), engine.micro_steps]
        engine.destroy()
    return results


@pytest.mark.parametrize("stage", [0, 3])
def test_23_a_new_process_goes_on_bit_for_bit_with_every_schedule_and_optimizer(stage, tmp_path):
    want, got = (run_ranks(2, what, stage, str(tmp_path)) for what in (straight, resumed))
    for ours, theirs in zip(got, want):
        for name in SETTINGS:
            assert ours[name] == theirs[name], name


# ---- what was asked for is what is loaded ----------------------------------------------------------------------------
def parts(rank, world, stage):
    engine = make(stage)
    train(engine, rank, 0, 2)
    engine.save_checkpoint("ckpt", tag="early")
    early = dense.weights(engine, engine.module)
    train(engine, rank, 2, 4)
    engine.save_checkpoint("ckpt", tag="late")
    late = values(engine)
    engine.destroy()

    def loaded(**arguments):
        fresh = make(stage, seed=7)
        path, client = fresh.load_checkpoint("ckpt", **arguments)
        got = values(fresh)
        facts = (os.path.basename(os.path.dirname(path)), fresh.global_steps, fresh.module.seen.item())
        fresh.destroy()
        return got, facts
    got, facts = loaded(tag="early", load_optimizer_states=False)
    assert facts == ("early", 2, 2) and all(torch.equal(got[k], v) for k, v in early.items())
    assert all(not v.any() for k, v in got.items() if "exp_avg" in k)
    got, facts = loaded(load_module_only=True)
    assert facts == ("late", 0, 4) and all(torch.equal(got[k], late[k]) for k in early)
    assert all(not v.any() for k, v in got.items() if "exp_avg" in k)
    got, facts = loaded()
    assert facts == ("late", 4, 4) and all(torch.equal(got[k], v) for k, v in late.items())

    # The caller's own way of putting the weights in place; the rest is loaded as ever.
    fresh, seen = make(stage, seed=7), {}

    def place(src, dst):
        seen.update(src)
        dst.load_state_dict(src)
    fresh.load_checkpoint("ckpt", custom_load_fn=place)
    assert set(seen) == set(fresh.module.state_dict())
    got = values(fresh)
    assert fresh.global_steps == 4 and all(torch.equal(got[k], v) for k, v in late.items())
    fresh.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_10_the_tag_and_the_parts_asked_for_are_loaded(stage):
    run_ranks(2, parts, stage)


def damaged_for_the_callers_function(rank, world, weights_only):
    engine = make(3)
    train(engine, rank, 0, 2)
    engine.save_checkpoint("ckpt", tag="t")
    engine.destroy()
    victim = pathlib.Path("ckpt/t/rank_1.safetensors")
    if rank == 0:
        data = bytearray(victim.read_bytes())
        data[-1 if not weights_only else 8 + int.from_bytes(data[:8], "little") + _first_weight(data)] ^= 1
        victim.write_bytes(data)
    fresh, called = make(3, seed=7), []
    before = values(fresh)
    with pytest.raises(unshard.CheckpointError, match="rank_1.safetensors"):
        fresh.load_checkpoint("ckpt", custom_load_fn=lambda src, dst: called.append(1), load_module_only=weights_only)
    assert not called and all(torch.equal(v, before[k]) for k, v in values(fresh).items())
    fresh.destroy()


def _first_weight(data):
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    return min(entry["data_offsets"][0] for key, entry in header.items() if key.startswith(("fp32.", "param.")))


@pytest.mark.parametrize("weights_only", [True, False])
def test_the_callers_function_gets_no_damaged_values(weights_only):
    run_ranks(2, damaged_for_the_callers_function, weights_only)


def on_storage_of_each_host(rank, world, hosts):
    os.environ["UNSHARD_HOST"] = f"host{rank % hosts}"
    if hosts > 1:
        with pytest.raises(ValueError, match="use_node_local_storage = true, but the ranks are on several hosts"):
            make(1, checkpoint={"use_node_local_storage": True})
        return
    engine = make(1, checkpoint={"use_node_local_storage": True})
    engine.save_checkpoint("ckpt")
    engine.load_checkpoint("ckpt")
    engine.destroy()


@pytest.mark.parametrize("hosts", [1, 2])
def test_storage_of_each_host_is_taken_where_there_is_one_host(hosts):
    """As Trainer's save_on_each_node writes it."""
    run_ranks(2, on_storage_of_each_host, hosts)


class Other(Net):
    def __init__(self):
        super().__init__(3)
        self.more = nn.Linear(3, 3)


def names_differ(rank, world):
    engine = make(3)
    train(engine, rank, 0, 2)
    engine.save_checkpoint("ckpt")
    want = dense.weights(engine, engine.module)
    engine.destroy()
    other = unshard.initialize(model=Other(), config=dense.config(3, optimizer=ADAMW))[0]
    before = dense.hex_of(dense.weights(other, other.module).values())
    with pytest.raises(unshard.CheckpointError, match="has no 'more.weight', 'more.bias'; a non-strict load takes what is there"):
        other.load_checkpoint("ckpt")
    assert dense.hex_of(dense.weights(other, other.module).values()) == before and other.global_steps == 0
    other.load_checkpoint("ckpt", load_module_strict=False)
    got = dense.weights(other, other.module)
    assert all(torch.equal(got[k], v) for k, v in want.items()) and other.global_steps == 2
    other.destroy()


def test_10_missing_names_are_an_error_that_lists_them_or_are_left():
    run_ranks(2, names_differ)


def written_over(rank, world):
    for settings in ({}, {"bf16": {"enabled": True}}):
        engine = make(2, **settings)
        train(engine, rank, 0, 1)
        engine.save_checkpoint("ckpt", tag="same")
        want = dense.weights(engine, engine.module)
        engine.destroy()
    fresh = make(3, seed=4)
    fresh.load_checkpoint("ckpt", tag="same")
    got = dense.weights(fresh, fresh.module)
    assert all(torch.equal(got[k], v) for k, v in want.items())
    if rank == 0:
        assert sorted(os.listdir("ckpt/same")) == ["manifest.json", "rank_0.safetensors", "rank_1.safetensors", "state.json",
                                                   "state.safetensors"]
    fresh.destroy()


def test_10_a_save_over_a_tag_leaves_nothing_of_the_former():
    run_ranks(2, written_over)


def nested_tags(rank, world):
    engine = make(3)
    train(engine, rank, 0, 1)
    for tag, named in (("epoch1/step1", "epoch1/step1"), ("./plain/", "plain"), ("epoch1/step2", "epoch1/step2")):
        engine.save_checkpoint("ckpt", tag=tag)
        assert pathlib.Path("ckpt/latest").read_text() == named
        for asked in (None, tag):
            path, _ = engine.load_checkpoint("ckpt", tag=asked)
            assert os.path.dirname(os.path.normpath(path)) == os.path.join("ckpt", named)
    if rank == 0:
        assert sorted(os.listdir("ckpt")) == ["epoch1", "latest", "plain", "zero_to_fp32.py", "zero_to_torch.py"]
        assert sorted(os.listdir("ckpt/epoch1")) == ["step1", "step2"]
        done = subprocess.run(["./zero_to_fp32.py", ".", "out"], cwd="ckpt", capture_output=True, text=True, env={
            **os.environ, "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]})
        assert done.stdout == "out: pytorch_model.bin\n", done
    engine.destroy()


def test_a_tag_may_be_a_folder_in_a_folder():
    run_ranks(2, nested_tags)


# ---- frozen parameters -----------------------------------------------------------------------------------------------
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.base = nn.Linear(64, 64).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x):
        return self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))


def adapters(rank, world):
    def build():
        return unshard.initialize(model=Adapted(), config=dense.config(3, optimizer=ADAMW))[0]
    engine = build()
    for step in range(2):
        engine.backward(engine(torch.full((2, 64), 0.1 * (rank + step))).pow(2).mean())
        engine.step()
    engine.save_checkpoint("all")
    engine.save_checkpoint("some", exclude_frozen_parameters=True)
    want = dense.weights(engine, engine.module)
    state = engine.optimizer.state_dict()["state"]
    engine.destroy()
    for folder in ("all", "some"):
        manifest = json.loads(pathlib.Path(folder, "global_step2", "manifest.json").read_text())
        assert {p["name"] for p in manifest["parameters"] if p["group"] == -1} == {"base.weight", "base.bias"}
    sizes = [sum(f.stat().st_size for f in pathlib.Path(folder).rglob("rank_*")) for folder in ("all", "some")]
    for folder in ("all", "some"):
        fresh = build()
        with torch.no_grad():
            for p in fresh.module.up.parameters():
                p.zero_()
        fresh.load_checkpoint(folder)
        got = dense.weights(fresh, fresh.module)
        assert all(torch.equal(got[k], v) for k, v in want.items()) and set(fresh.optimizer.state_dict()["state"]) == set(state)
        fresh.destroy()
    return sizes


def test_15_frozen_parameters_are_saved_once_or_not_at_all():
    all_bytes, some_bytes = run_ranks(2, adapters)[0]
    adapter, headers = 2 * 64 * 2 * 4 * 3, 2 * 4096           # weights and two moments in fp32; the files' headers
    assert some_bytes == adapter + headers and all_bytes == some_bytes + (64 * 64 + 64) * 2


# ---- errors ----------------------------------------------------------------------------------------------------------
def errors(rank, world):
    engine = make(3)
    train(engine, rank, 0, 1)
    engine.save_checkpoint("ckpt", tag="good")
    for client, part in (({"a": {"b": object()}}, r"client_state\['a'\]\['b'\] is a object"), ({"f": lambda: 0}, r"client_state\['f'\]")):
        with pytest.raises(unshard.CheckpointError, match=part):
            engine.save_checkpoint("ckpt", tag="good", client_state=client if rank == 0 else {})
    for tag in ("", "/a", "../a", "..", "a/../b", "latest", "latest/a", "x.partial", "x.partial/a", "./"):
        with pytest.raises(ValueError, match="can't be the name of a folder"):
            engine.save_checkpoint("ckpt", tag=tag)
    with pytest.raises(unshard.CheckpointError, match="there: good"):
        engine.load_checkpoint("ckpt", tag="bad")
    before = dense.hex_of(values(engine).values())
    if rank == 0:
        for file in ("rank_1.safetensors", "state.safetensors", "state.json", "manifest.json"):
            data = pathlib.Path("ckpt/good", file).read_bytes()
            pathlib.Path("ckpt", file).mkdir()
            for other in pathlib.Path("ckpt/good").iterdir():
                pathlib.Path("ckpt", file, other.name).write_bytes(other.read_bytes() if other.name != file else data[:-9] + b"12345678}")
    for file in ("rank_1.safetensors", "state.safetensors", "state.json", "manifest.json"):
        with pytest.raises(unshard.CheckpointError, match=file):
            engine.load_checkpoint("ckpt", tag=file)
    assert dense.hex_of(values(engine).values()) == before
    engine.load_checkpoint("ckpt")
    train(engine, rank, 1, 2)
    engine.destroy()


def test_10_every_error_is_on_all_ranks_and_nothing_is_lost():
    run_ranks(2, errors)


def tags(rank, world, validation):
    engine = make(1, checkpoint={"tag_validation": validation})
    try:
        engine.save_checkpoint("ckpt", tag=f"tag{rank}")
    except unshard.CheckpointError as error:
        return str(error)
    return sorted(os.listdir("ckpt"))[:2]


def test_ranks_with_different_tags():
    for outcome in run_ranks(2, tags, "Warn") + run_ranks(2, tags, "ignore"):
        assert outcome == ["latest", "tag0"]
    for outcome in run_ranks(2, tags, "Fail"):
        assert "rank 0 saves under tag 'tag0', rank 1 under 'tag1'" in outcome


def nothing_there(rank, world):
    engine = make(1)
    os.makedirs("empty", exist_ok=True)
    assert engine.load_checkpoint("empty") == (None, None) and engine.load_checkpoint("nowhere") == (None, None)
    engine.destroy()


def test_a_folder_without_a_checkpoint_gives_none_and_one_warning():
    outcomes = run_ranks(2, nothing_there, expect_failure=True, env={"UNSHARD_QUIET": "0"})
    assert [o.code for o in outcomes] == [0, 0], outcomes[0].output
    assert outcomes[0].output.count("empty/latest isn't there; nothing was loaded") == 1 and "isn't there" not in outcomes[1].output


# ---- in the background -----------------------------------------------------------------------------------------------
def in_background(rank, world, key):
    engine = make(3, **key)
    at = {}
    for step in range(5):
        train(engine, rank, step, step + 1)
        engine.save_checkpoint("ckpt", client_state={"step": step})
        at[step] = dense.hex_of(values(engine).values())
    engine.destroy()
    for step in (3, 4):
        fresh = make(2, seed=6)
        _, client = fresh.load_checkpoint("ckpt", tag=f"global_step{step + 1}")
        assert client == {"step": step} and dense.hex_of(values(fresh).values()) == at[step]
        fresh.destroy()
    return sorted(n for n in os.listdir("ckpt") if n.startswith("global"))


def test_saves_in_the_background_hold_their_moment_and_the_newest_are_kept():
    kept = run_ranks(2, in_background, {"unshard": {"checkpoint": {"async": True, "keep": 2}}})
    assert kept == [["global_step4", "global_step5"]] * 2
    kept = run_ranks(2, in_background, {"checkpoint": {"writer": {"decoupled": True}}})
    assert kept == [[f"global_step{n}" for n in range(1, 6)]] * 2


def saved_last(rank, world, folder):
    engine = make(3, unshard={"checkpoint": {"async": True}})
    train(engine, rank, 0, 1)
    engine.save_checkpoint(folder)


def test_a_save_in_the_background_is_finished_when_the_script_ends(tmp_path):
    run_ranks(2, saved_last, str(tmp_path))
    _core.verify_checkpoint(str(tmp_path / "global_step1"))
    assert (tmp_path / "latest").read_text() == "global_step1"


WITHOUT_NUMPY = """
import runpy, sys, warnings
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
sys.meta_path.insert(0, Missing())
warnings.simplefilter("ignore")                   # torch's, that it has no numpy
sys.path.insert(0, sys.argv[1])
import torch, unshard
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
engine, *_ = unshard.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
                                                     "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
engine.step()
engine.save_checkpoint("c", client_state={"note": b"bytes"})
drawn = torch.rand(3)
assert engine.load_checkpoint("c")[1] == {"note": b"bytes"} and torch.equal(torch.rand(3), drawn)
for folder, error in (("array", "pip install numpy"), ("plain", None)):      # written where numpy was in use
    try:
        engine.load_checkpoint(folder)
    except unshard.CheckpointError as refused:
        assert error and error in str(refused), refused
    else:
        assert not error
engine.destroy()
sys.argv = ["zero_to_fp32.py", "c", "fp32"]
runpy.run_path("c/zero_to_fp32.py", run_name="__main__")
"""


def test_numpy_is_not_needed(tmp_path):
    """torch doesn't bring it, and unshard asks pip for torch alone."""
    import numpy
    engine, *_ = unshard.initialize(model=nn.Linear(4, 4), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    engine.step()
    engine.save_checkpoint(str(tmp_path / "array"), client_state={"array": numpy.ones(3)})
    engine.save_checkpoint(str(tmp_path / "plain"))
    engine.destroy()
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY, str(pathlib.Path(unshard.__file__).parents[1])], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fp32" / "pytorch_model.bin").exists()


# ---- killed at any moment --------------------------------------------------------------------------------------------
WRITER = """
import sys
import test_checkpoints as tests
rank, world, folder, background = int(sys.argv[1]), 2, sys.argv[2], sys.argv[3] == "True"
engine = tests.make(3, seed=1, unshard={"checkpoint": {"async": background, "keep": 3}})
engine.load_checkpoint(folder)
print("ready", flush=True)
while True:
    tests.train(engine, rank, engine.global_steps, engine.global_steps + 1)
    engine.save_checkpoint(folder, client_state={"step": engine.global_steps})
"""


def newest_loads(rank, world, folder):
    engine = make(1, seed=3)
    _, client = engine.load_checkpoint(folder)
    facts = [engine.global_steps, client["step"], dense.hex_of(values(engine).values())]
    engine.destroy()
    return facts


def twin(rank, world, steps):
    engine = make(3)
    train(engine, rank, 0, steps)
    facts = dense.hex_of(values(engine).values())
    engine.destroy()
    return facts


def test_10_killed_at_random_moments_of_saving_the_newest_complete_checkpoint_loads(tmp_path):
    folder, generator, reached = str(tmp_path / "ckpt"), random.Random(3), 0
    for round in range(50 if SOAK else 3):
        port = free_port()
        ranks = [subprocess.Popen([sys.executable, "-c", WRITER, str(rank), folder, str(round % 2 == 1)], stdout=subprocess.PIPE,
                                  env={**rank_env(rank, 2, port), "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
                                  stderr=subprocess.DEVNULL, start_new_session=True) for rank in range(2)]
        try:
            assert all(p.stdout.readline() == b"ready\n" for p in ranks)
            time.sleep(generator.uniform(0.02, 0.5))
        finally:
            for p in generator.sample(ranks, 2):
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
        if not os.path.exists(f"{folder}/latest"):
            continue
        with open(f"{folder}/latest") as file:
            tag = file.read()
        _core.verify_checkpoint(f"{folder}/{tag}")
        steps, said, _ = run_ranks(2, newest_loads, folder)[0]
        assert tag == f"global_step{steps}" and said == steps >= reached
        reached = steps
    assert reached > 0
    assert run_ranks(2, newest_loads, folder)[0][2] == run_ranks(2, twin, reached)[0]      # nothing was lost on the way


def test_manifests_are_json_that_says_what_is_where(tmp_path):
    run_ranks(2, saved_last, str(tmp_path))
    manifest = json.loads((tmp_path / "global_step1" / "manifest.json").read_text())
    assert manifest["format"] == 2 and manifest["world_size"] == 2 and manifest["stage"] == 3 and manifest["tag"] == "global_step1"
    assert manifest["optimizer"] == {"type": "adamw", "states": ["exp_avg", "exp_avg_sq"]}
    assert manifest["shared"] == {"again.weight": "turned.weight", "again.bias": "turned.bias"}
    from safetensors.torch import load_file
    pieces = {}
    for file, record in manifest["files"].items():
        assert (tmp_path / "global_step1" / file).stat().st_size == record["bytes"]
        if "tensors" in record:
            stored = load_file(tmp_path / "global_step1" / file)
            assert set(stored) == set(record["tensors"])
            for key, piece in record["tensors"].items():
                assert key == f"{piece['kind']}.{piece['parameter']}" and stored[key].shape == (piece["end"] - piece["begin"],)
                pieces.setdefault((piece["parameter"], piece["kind"]), []).append((piece["begin"], piece["end"]))
    shapes = {p["name"]: p["shape"] for p in manifest["parameters"]}
    assert {name for name, _ in pieces} == set(shapes)
    for (name, _), ranges in pieces.items():
        ranges.sort()
        assert ranges[0][0] == 0 and ranges[-1][1] == torch.Size(shapes[name]).numel() and ranges[0][1] == ranges[-1][0]


# ---- whole weights in one file ----------------------------------------------------------------------------------------------------------
def one_file(rank, world, stage):
    engine = make(stage, bf16={"enabled": True}, zero={"stage3_gather_16bit_weights_on_model_save": True})
    train(engine, rank, 0, 1)
    assert engine.save_16bit_model("out") and engine.save_16bit_model("out", "model.safetensors")
    state = engine._consolidated_16bit_state_dict()
    with pytest.raises(unshard.CheckpointError, match="a file"):
        pathlib.Path("a file").touch()
        engine.save_16bit_model("a file/out")
    if rank == 0:
        from safetensors.torch import load_file
        written, stored = torch.load("out/pytorch_model.bin"), load_file("out/model.safetensors")
        assert set(written) == set(state) and set(stored) == set(state) - {"again.weight", "again.bias"}
        assert all(torch.equal(written[k], v) and written[k].dtype == v.dtype for k, v in state.items())
        assert all(torch.equal(v, state[k]) for k, v in stored.items())
        assert written["again.weight"].data_ptr() == written["turned.weight"].data_ptr()
        assert sorted(os.listdir("out")) == ["model.safetensors", "pytorch_model.bin"]
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_11_whole_weights_are_written_one_at_a_time_and_tied_ones_once(stage):
    run_ranks(2, one_file, stage)
