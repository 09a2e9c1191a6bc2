"""When a rank dies, stalls or finds NaN, the others end soon with an error that says who, where and what."""
import os
import re
import signal
import socket
import time

import dense
import pytest
import torch
import torch.nn as nn
from ranks import run_ranks

PHASES = ["initialize", "forward", "backward", "step", "between"]


class Dies(nn.Module):
    """Kills its process when told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.when = nn.Linear(64, 64), nn.Linear(64, 64), None

    def forward(self, x):
        h = self.a(x)
        if self.when == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.when == "backward":
            h.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
        return self.b(h).sum()


def killed(rank, world, stage, phase, victim):
    import unshard
    model = Dies()
    if rank == victim and phase == "initialize":
        unshard.init_distributed()
        os.kill(os.getpid(), signal.SIGKILL)
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(stage))
    for step in range(6):
        dying = rank == victim and step == 3
        model.when = phase if dying else None
        loss = engine(torch.ones(2, 64))
        engine.backward(loss)
        if dying and phase == "step":
            import threading
            threading.Timer(0.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        engine.step()
        if dying and phase == "between":
            os.kill(os.getpid(), signal.SIGKILL)
    return True


@pytest.mark.parametrize("memory", [{}, {"UNSHARD_SHARE_MEMORY": "off"}], ids=["shared", "unshared"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stage", [1, 3])
def test_survivors_end_within_10_s_and_name_the_dead(stage, phase, memory):
    outcomes = run_ranks(3, killed, stage, phase, 1, expect_failure=True, limit=60, env=memory)
    assert outcomes[1].code == -signal.SIGKILL
    for o in outcomes[::2]:
        assert o.code not in (0, None), f"rank {o.rank}: {o.code}\n{o.output[-2000:]}"
        assert o.seconds - outcomes[1].seconds < 10, f"rank {o.rank} took {o.seconds - outcomes[1].seconds:.1f} s"
        named = ["rank 1 is gone", "rank 1 (pid", "rank 1 can't be reached"] + (["rank 1 hasn't come"] if phase == "initialize" else [])
        assert any(words in o.output for words in named), o.output[-2000:]


def stalls(rank, world, stage):
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()),
                                    config=dense.config(stage, unshard={"timeout_s": 3}))
    for step in range(3):
        engine.backward(engine(torch.ones(2, 64)).sum())
        if step == 2 and rank == 1:
            time.sleep(30)
        engine.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_stall_is_reported_with_who_waits_where(stage):
    outcomes = run_ranks(2, stalls, stage, expect_failure=True, limit=25)
    o = outcomes[0]
    assert o.code not in (0, None), o.output[-2000:]
    assert "rank 1" in o.output and "step 2" in o.output and "rank 0" in o.output, o.output[-2000:]


ALONE = {
    "get_full_fp32_param": lambda utils, w: utils.safe_get_full_fp32_param(w),
    "get_full_grad": lambda utils, w: utils.safe_get_full_grad(w),
    "get_full_state": lambda utils, w: utils.safe_get_full_optimizer_state(w, "exp_avg"),
    "set_full_fp32_param": lambda utils, w: utils.safe_set_full_fp32_param(w, torch.zeros(64, 64)),
    "set_local_grad": lambda utils, w: utils.safe_set_local_grad(w, torch.zeros(64 * 32)),
    "compute_grad_norm": lambda utils, w: utils.owners.find(w).engine().compute_grad_norm(),
}


def called_on_one_rank(rank, world, call):
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()),
                                    config=dense.config(3, unshard={"collective_check_s": 2}))
    engine.backward(engine(torch.ones(2, 64)).sum())
    if rank == 0:
        ALONE[call](unshard, model[1].weight)
    engine.step()


@pytest.mark.parametrize("memory", [{}, {"UNSHARD_SHARE_MEMORY": "off"}], ids=["shared", "unshared"])
@pytest.mark.parametrize("call", list(ALONE))
def test_a_collective_access_on_one_rank_is_named(call, memory):
    outcomes = run_ranks(2, called_on_one_rank, call, expect_failure=True, limit=30, env=memory)
    assert all(o.code not in (0, None) for o in outcomes), [o.output[-1500:] for o in outcomes]
    assert call.removeprefix("get_") in outcomes[0].output, outcomes[0].output[-1500:]
    assert call == "compute_grad_norm" or "1.weight" in outcomes[0].output, outcomes[0].output[-1500:]


LONG = {"an edit": ("GatheredParameters) of '1.weight'", lambda engine, w: unshard_edit(w)),
        "inference": ("enter inference_mode", lambda engine, w: engine.inference_mode().__enter__())}


def unshard_edit(w):
    import unshard
    with unshard.zero.GatheredParameters(w, modifier_rank=0):
        w.data.zero_()


def entered_on_one_rank(rank, world, call):
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()),
                                    config=dense.config(3, unshard={"collective_check_s": 2, "timeout_s": 6}))
    engine.backward(engine(torch.ones(2, 64)).sum())
    if rank == 0:
        LONG[call][1](engine, model[1].weight)
    engine.step()


@pytest.mark.parametrize("memory", [{}, {"UNSHARD_SHARE_MEMORY": "off"}], ids=["shared", "unshared"])
@pytest.mark.parametrize("call", list(LONG))
def test_what_may_rightly_take_long_on_one_rank_is_warned_of_and_named(call, memory):
    outcomes = run_ranks(2, entered_on_one_rank, call, expect_failure=True, limit=30, env={**memory, "UNSHARD_QUIET": ""})
    assert all(o.code not in (0, None) for o in outcomes), [o.output[-1500:] for o in outcomes]
    said = "".join(o.output for o in outcomes)
    assert LONG[call][0] in said, said[-3000:]
    in_step = re.compile(r"\[comm\.\w+ 'engine\.step'\]|reducing, step 0, at 'step'")
    if not memory:
        assert any("still waiting" in line and LONG[call][0] in line and in_step.search(line) for line in said.splitlines()), said[-3000:]


def not_a_number(rank, world):
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(2, bf16={"enabled": True}))
    for step in range(3):
        x = torch.ones(1, 4, dtype=torch.bfloat16)
        loss = engine(x).float().sum()
        engine.backward(loss * float("nan") if step == 1 and rank == 1 else loss)
        engine.step()
    assert engine.skipped_steps == 1


def test_nan_names_step_rank_and_parameter():
    outcomes = run_ranks(2, not_a_number, expect_failure=True, env={"UNSHARD_QUIET": ""})
    text = outcomes[0].output + outcomes[1].output
    assert all(o.code == 0 for o in outcomes), text[-3000:]
    line = next(x for x in text.splitlines() if "finite" in x.lower() or "nan" in x.lower())
    assert "step 1" in line and "rank 1" in line and (".weight" in line or ".bias" in line), line


def unusable_port(rank, world):
    import unshard
    unshard.initialize(model=nn.Linear(2, 2), config=dense.config(0))


def test_a_taken_port_is_one_line():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        outcomes = run_ranks(1, unusable_port, expect_failure=True, limit=60,
                             env={"MASTER_PORT": str(s.getsockname()[1]), "WORLD_SIZE": "2", "RANK": "0"})
    assert outcomes[0].code not in (0, None)
    last = outcomes[0].output.strip().splitlines()[-1]
    assert "port" in last.lower() or "address" in last.lower() or "MASTER_PORT" in last, outcomes[0].output[-1500:]


def test_a_missing_config_file_is_one_line():
    import unshard
    with pytest.raises(Exception) as error:
        unshard.initialize(model=nn.Linear(2, 2), config="/nonexistent/ds.json")
    assert "/nonexistent/ds.json" in str(error.value)


def cut_short_in_save(rank, world, apart, folder, killed):
    """Rank 1 can't write more than a part of its file: it is killed there, or has an error as from a full disk."""
    import resource

    import unshard
    if apart:
        os.environ["UNSHARD_HOST"] = f"host{rank}"
    torch.manual_seed(0)
    model = nn.Linear(300, 300)                                  # 360 KB, and twice that of moments, over the ranks
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()),
                                    config=dense.config(3, unshard={"timeout_s": 20, "collective_check_s": 20}))
    engine.backward(engine(torch.ones(2, 300)).sum())
    engine.step()
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if killed else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        engine.save_checkpoint(folder)
    except unshard.CheckpointError as error:
        return ["CheckpointError", str(error)]
    except unshard.CommError as error:
        return ["CommError", str(error)]


@pytest.mark.parametrize("memory", ["shared", "unshared", "hosts"])
def test_a_rank_killed_in_a_save_is_a_lost_rank_and_a_full_disk_an_error_of_the_checkpoint(memory, tmp_path):
    env = {"UNSHARD_SHARE_MEMORY": "off"} if memory == "unshared" else {}
    lost = run_ranks(2, cut_short_in_save, memory == "hosts", str(tmp_path / "a"), True, expect_failure=True, limit=40, env=env)
    assert lost[1].code == -signal.SIGXFSZ, lost[1].output[-2000:]
    kind, text = lost[0].value or ["nothing", lost[0].output]
    assert kind == "CommError" and "rank 1" in text and "gone" in text and "save'" in text and "step 1" in text, (kind, text)
    full = run_ranks(2, cut_short_in_save, memory == "hosts", str(tmp_path / "b"), False, expect_failure=True, limit=40, env=env)
    for o in full:
        kind, text = o.value or ["nothing", o.output]
        assert kind == "CheckpointError" and "rank_1.safetensors" in text and "File too large" in text, (o.rank, kind, text)
