"""The engine as Python users meet it: protocol, counters, getters, data, state, destroy."""
import copy
import gc
import inspect
import json
import os
import pathlib
import shutil
import signal
import threading
import time
import weakref

import dense
import pytest
import torch
import torch.nn as nn
from ranks import run_ranks

import unshard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return self.down(torch.tanh(self.up(x)))

    def only_here(self):
        return "mine"


def loss_of(model, rank, step):
    x, y = dense.batch(rank, step)
    return ((model(x) - y)**2).mean()


def make(stage=3, **more):
    model = Net()
    engine, optimizer, loader, scheduler = unshard.initialize(model=model, config=dense.config(stage, **more))
    return model, engine, optimizer


def test_it_is_a_module_around_the_users_model():
    model, engine, optimizer = make()
    assert isinstance(engine, nn.Module) and engine.module is model and engine.only_here() == "mine" and engine.up is model.up
    assert sorted(engine.module_state_dict()) == sorted(model.state_dict())
    assert {k.removeprefix("module.") for k in engine.state_dict()} == set(model.state_dict())
    assert not hasattr(engine, "no_such_thing") and isinstance(optimizer, torch.optim.Optimizer)
    with pytest.raises(AttributeError, match="neither the engine nor its module Net has an attribute 'no_such_thing'"):
        print(engine.no_such_thing)
    assert engine.device.type == next(model.parameters()).device.type
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training
    engine.destroy()


def test_getters_are_methods_with_the_resolved_values():
    model, engine, _ = make(2, gradient_accumulation_steps=3, train_micro_batch_size_per_gpu=5, gradient_clipping=0.25, steps_per_print=7)
    assert engine.get_batch_info() == (15, 5, 3)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (15, 5, 3)
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 2 and engine.gradient_clipping() == 0.25
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.loss_scale() == 1 and engine.steps_per_print() == 7
    assert engine.get_lr() == [0.1] and engine.config["zero_optimization"]["stage"] == 2 and engine.get_global_grad_norm() is None
    engine.set_train_batch_size(30)
    assert engine.get_batch_info() == (30, 5, 6)
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (12, 2, 6)
    for micro in range(6):
        engine.backward(loss_of(engine, 0, micro))
        engine.step()
    assert (engine.global_samples, engine.global_steps) == (12, 1)
    engine.set_train_micro_batch_size(5)
    with pytest.raises(ValueError, match="isn't a multiple"):
        engine.set_train_batch_size(31)
    for wrong in ("8", None, 4.0, True, 0):
        for setter in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
            with pytest.raises(ValueError, match=r"\[engine.set_train_\w+\] .* isn't a positive whole number"):
                setter(wrong)
    assert engine.get_batch_info() == (30, 5, 6)
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    engine.destroy()


def test_misuse_of_the_optimizer_is_said():
    model, engine, optimizer = make(1)
    with pytest.raises(TypeError, match="can't be copied: its state belongs to the engine"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="it has no 'state'"):
        optimizer.load_state_dict({})
    engine.destroy()


def styles(rank, world, stage, style, dtype):
    """engine.backward, engine.scale(loss).backward() and plain loss.backward() are one thing, with accumulation and a loss scale too."""
    sections = {"fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}}, "fp32": {}}[dtype]
    model, engine, _ = make(stage, gradient_accumulation_steps=2, **sections)
    cast = model.up.weight.dtype

    def loss(micro):
        x, y = dense.batch(rank, micro)
        return ((engine(x.to(cast)).float() - y)**2).mean()
    for micro in range(4):
        value = loss(micro)
        if style == "engine":
            returned = engine.backward(value)
            assert abs(returned.item() - value.item() / 2) < 1e-4
        else:
            scaled = engine.scale(value) if style == "scale" else value
            assert scaled.item() == value.item() * (engine.optimizer.cur_scale if style == "scale" else 1)
            scaled.backward()
        engine.step()
    norm = engine.get_global_grad_norm()
    bits = dense.hex_of(dense.weights(engine, model).values())
    engine.destroy()
    return [bits, norm]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_three_ways_to_backward_agree_bit_for_bit(stage, dtype):
    results = [run_ranks(2, styles, stage, style, dtype) for style in ("engine", "scale")]
    assert results[0] == results[1] and results[0][0][1] > 0
    plain = run_ranks(2, styles, stage, "plain", dtype)
    assert plain[0][1] == pytest.approx(results[0][0][1], rel=1e-3)


def test_several_losses_before_a_step_add_up():
    model, engine, _ = make(3)
    twin = Net()
    with engine.coalesce_grad_reduction():
        for step in range(3):
            engine.backward(loss_of(engine, 0, step))
        with pytest.raises(ValueError, match="no_sync"):
            engine.step()
    engine.step()
    sum(loss_of(twin, 0, step) for step in range(3)).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    dense.close(dense.weights(engine, model).values(), twin.parameters(), 1e-6)
    engine.destroy()


def test_boundary_override_and_counters():
    model, engine, _ = make(1, gradient_accumulation_steps=4)
    applied = []
    for micro in range(4):
        engine.set_gradient_accumulation_boundary(micro % 2 == 1)
        engine.backward(loss_of(engine, 0, micro))
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True] and (engine.micro_steps, engine.global_steps, engine.skipped_steps) == (4, 2, 0)
    engine.destroy()


def test_a_program_that_says_itself_when_to_update():
    model, engine, optimizer = make(2, gradient_accumulation_steps=4, managed_gradient_accumulation=False)
    boundary = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: boundary.append(engine.is_gradient_accumulation_boundary()))
    for backwards in (3, 1):
        for micro in range(backwards):
            engine.backward(loss_of(engine, 0, micro))
        boundary.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    assert boundary == [False, True, False, True]
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (2, 2, 16)     # micro-batches of 4
    engine.destroy()


def test_an_overflow_is_told_until_the_next_update():
    model, engine, optimizer = make(1, gradient_accumulation_steps=2, fp16={"enabled": True, "initial_scale_power": 4})
    told = []
    for micro in range(6):
        x, y = dense.batch(0, micro)
        loss = ((engine(x.half()).float() - y)**2).mean()
        engine.backward(loss * 1e30 if micro == 1 else loss)
        engine.step()
        told.append(optimizer.overflow)
    assert told == [False, True, True, False, False, False]
    engine.destroy()


def test_numbers_come_back_as_they_were_written():
    model, engine, _ = make(2, gradient_clipping=1, gradient_predivide_factor=2, bf16={"enabled": True})
    assert [type(engine.gradient_clipping()), type(engine.gradient_predivide_factor())] == [int, int]
    assert engine.dynamic_loss_scale_args() == {"init_scale": 65536, "scale_window": 1000, "delayed_shift": 2,
                                                "consecutive_hysteresis": False, "min_scale": 1}
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    engine._answers_as_deepspeed = True
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
    engine.destroy()


class HandWritten:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] /= 2


def test_a_schedule_may_be_given_as_its_class():
    engine, _, _, schedule = unshard.initialize(model=Net(), config=dense.config(0), lr_scheduler=HandWritten)
    engine.backward(loss_of(engine, 0, 0))
    engine.step()
    assert isinstance(schedule, HandWritten) and engine.get_lr() == [0.05]
    engine.destroy()


def test_compute_grad_norm_is_that_of_the_next_step():
    model, engine, _ = make(3, gradient_clipping=1e-3)
    engine.backward(loss_of(engine, 0, 0))
    before = engine.compute_grad_norm()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(before, rel=1e-6)
    engine.destroy()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 21

    def __getitem__(self, i):
        return torch.full((8,), float(i)), torch.zeros(8)


def loaders(rank, world):
    model = Net()
    engine, _, loader, _ = unshard.initialize(model=model, config=dense.config(1, dataloader_drop_last=False), training_data=Rows())
    rows = [int(v) for x, _ in loader for v in x[:, 0]]
    sizes = [len(x) for x, _ in loader]
    assert engine.training_dataloader is loader and len(loader) == len(sizes)
    again = unshard.RepeatingLoader(loader)
    assert [len(next(again)[0]) for _ in range(2 * len(sizes))] == sizes * 2
    for route in ("eval", "predict"):
        inorder = [int(v) for x, _ in engine.deepspeed_io(Rows(), route=route) for v in x[:, 0]]
        assert inorder == [i % 21 for i in range(rank, 22, world)] != rows
    engine.destroy()
    return [rows, sizes]


def test_each_rank_loads_its_own_part():
    (rows0, sizes0), (rows1, sizes1) = run_ranks(2, loaders)
    assert set(rows0) | set(rows1) == set(range(21)) and len(rows0) == len(rows1) == 11      # one row twice, so that ranks are even
    assert sizes0 == sizes1 == [4, 4, 3]


def checkpoint(rank, world, stage, client):
    def build(seed):
        model = Net()
        torch.manual_seed(seed)
        for p in model.parameters():
            nn.init.normal_(p)
        chosen = {"optimizer": torch.optim.RMSprop(model.parameters(), lr=0.01)} if client else {}
        config = dense.config(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.1}},
                              optimizer={"type": "AdamW", "params": {"lr": 0.02}})
        return model, unshard.initialize(model=model, config=config, **chosen)[0]

    def train(engine, start, end):
        losses = []
        for step in range(start, end):
            loss = loss_of(engine, rank, step)
            engine.backward(loss)
            engine.step()
            losses.append([loss.item(), engine.get_lr()[0]])
        return losses
    model, engine = build(1)
    train(engine, 0, 3)
    assert engine.save_checkpoint("ckpt", client_state={"epoch": 3, "nested": {"a": [1, 2]}}) is True
    after = train(engine, 3, 6)
    engine.destroy()
    model, other = build(2)
    assert other.load_checkpoint("nowhere") == (None, None)
    with pytest.raises(unshard.CheckpointError, match="no_such"):
        other.load_checkpoint("ckpt", tag="no_such")
    path, state = other.load_checkpoint("ckpt")
    assert state == {"epoch": 3, "nested": {"a": [1, 2]}} and "global_step3" in path and other.loaded_checkpoint_tag == "global_step3"
    assert (other.global_steps, other.global_samples) == (3, 3 * 4 * world) and model.seen.item() == 3
    assert train(other, 3, 6) == after
    assert open("ckpt/latest").read() == "global_step3"
    other.destroy()


@pytest.mark.parametrize("stage, client", [(0, False), (2, False), (3, False), (3, True)])
def test_a_saved_engine_continues_exactly(stage, client):
    run_ranks(2, checkpoint, stage, client)


def whole_model(rank, world, stage, permitted):
    model, engine, _ = make(stage, zero={"stage3_gather_16bit_weights_on_model_save": permitted})
    engine.backward(loss_of(engine, rank, 0))
    engine.step()
    saved = engine.save_16bit_model("out", "w.bin")
    state = engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (rank != 0)
    if rank == 0:
        want = dense.weights(engine, model)
        assert all(torch.equal(state[k], v) for k, v in want.items()) and "seen" in state
        if saved:
            written = torch.load("out/w.bin")
            assert all(torch.equal(written[k], v) for k, v in want.items()) and "seen" in written
    else:
        dense.weights(engine, model)
    fresh = Net()
    engine.load_module_state_dict({k: v.clone().fill_(0.5) for k, v in fresh.state_dict().items()})
    assert all((v == 0.5).all() for v in dense.weights(engine, model).values())
    engine.destroy()
    return saved


def test_whole_weights_in_one_file():
    assert run_ranks(2, whole_model, 3, True) == [True, True]
    assert run_ranks(2, whole_model, 3, False) == [False, False]
    assert run_ranks(2, whole_model, 1, False) == [True, True]


def unequal_forwards(rank, world):
    model, engine, _ = make(3)
    with engine.inference_mode():
        before = engine._store.stats()["gathers"]
        for step in range(2 + 5 * rank):
            assert not engine(dense.batch(rank, step)[0]).requires_grad
        assert engine._store.stats()["gathers"] == before
    engine.backward(loss_of(engine, rank, 0))
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_inference_mode_communicates_nothing_inside(memory):
    run_ranks(2, unequal_forwards, env={"UNSHARD_SHARE_MEMORY": memory})


def test_destroy_gives_back_a_plain_module_and_lets_everything_go():
    model, engine, optimizer = make(3)
    engine.backward(loss_of(engine, 0, 0))
    engine.step()
    weights = [p.detach().clone() for p in model.parameters()]
    engine.destroy()
    assert all(torch.equal(torch.from_numpy(p.detach().numpy()), w) for p, w in zip(model.parameters(), weights))
    loss_of(model, 0, 1).backward()
    assert all(p.grad is not None for p in model.parameters())
    gone = weakref.ref(engine)
    del engine, optimizer
    gc.collect()
    assert gone() is None


def test_an_engine_that_is_dropped_leaves_a_model_that_works():
    model, engine, optimizer = make(3)
    want = model(torch.ones(1, 8)).detach().clone()
    gone = weakref.ref(engine)
    del engine, optimizer
    gc.collect()
    assert gone() is None and torch.equal(model(torch.ones(1, 8)).detach(), want)


def progress(rank, world):
    model = Net()
    engine, *_ = unshard.initialize(model=model, config=dense.config(1, steps_per_print=2))
    for step in range(4):
        engine.backward(loss_of(engine, rank, step))
        engine.step()
    engine.destroy()


def test_steps_per_print_prints_on_rank_0_only():
    outcomes = run_ranks(2, progress, expect_failure=True, env={"UNSHARD_QUIET": ""})
    assert [o.code for o in outcomes] == [0, 0]
    lines = [[line for line in o.output.splitlines() if "step=" in line] for o in outcomes]
    assert len(lines[0]) == 2 and "step=2, skipped=0, lr=[0.1]" in lines[0][0] and not lines[1]


def test_autocast_and_fp16_inputs():
    model, engine, _ = make(3, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert engine(torch.ones(2, 8)).dtype == torch.bfloat16 and model.up.weight.dtype == torch.float32
    engine.destroy()
    model, engine, _ = make(2, fp16={"enabled": True, "auto_cast": True})
    assert engine(torch.ones(2, 8)).dtype == torch.float16
    engine.destroy()


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs g++"))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", [1, 3])
def test_compile(stage, backend):
    model, engine, _ = make(stage)
    twin = Net()
    engine.compile(backend=backend)
    assert engine.is_compiled
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        engine.backward(loss_of(engine, 0, step))
        engine.step()
        sgd.zero_grad()
        loss_of(twin, 0, step).backward()
        sgd.step()
    dense.close(dense.weights(engine, model).values(), twin.parameters(), 1e-5)
    assert engine._store.stats()["pinned"] == 0
    engine.destroy()
    torch._dynamo.reset()


def test_eager_higher_order_operators_take_partitioned_parameters():
    model, engine, _ = make(3)
    x = torch.ones(2, 8)

    def chosen(flag):
        return torch.cond(flag, lambda w: w * 2, lambda w: w + 1, (model.up.weight,))
    assert torch.equal(chosen(torch.tensor(True)).detach(), model.up.weight.detach() * 2) and x is not None
    engine.destroy()


def test_the_flight_recorder_and_memory_report_can_be_read():
    model, engine, _ = make(3)
    engine.backward(loss_of(engine, 0, 0))
    engine.step()
    report = engine.memory_report()
    assert report["parameters"] == 4 * sum(p.numel() for p in model.parameters()) and json.dumps(report)
    assert engine.dtype_table() and isinstance(engine._store.comm.flight_record(), str)
    engine.destroy()


def interrupted(rank, world):
    model, engine, _ = make(3)
    engine.backward(loss_of(engine, rank, 0))
    if rank == 1:
        time.sleep(8)                               # never in step() while the other waits there
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        engine.step()
    except KeyboardInterrupt:
        print("interrupted after", time.monotonic() - start, flush=True)
        os._exit(7 if time.monotonic() - start < 5 else 1)


def test_ctrl_c_leaves_a_wait_for_a_peer():
    outcomes = run_ranks(2, interrupted, expect_failure=True)
    assert outcomes[0].code == 7, outcomes[0].output


def group_ended(rank, world, stage):
    import torch.distributed as dist
    model, engine, _ = make(stage)
    engine.backward(loss_of(engine, rank, 0))
    engine.step()
    dist.barrier()
    dist.destroy_process_group()
    names = [pathlib.Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    engine.backward(loss_of(engine, rank, 1))           # the engine goes on without it
    engine.step()
    return [name for name in names if "gloo" in name], engine.data_parallel_group


@pytest.mark.parametrize("stage", [1, 3])
def test_destroy_process_group_ends_gloo_though_an_engine_lives(stage):
    """Gloo's threads may hold Python's tensors: one that is left at exit aborts the process now and then."""
    assert run_ranks(2, group_ended, stage) == [[[], None]] * 2


def address_space_tib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmSize")) / 2**30


def dropped_engines(rank, world, stage):
    """The value that a kept parameter of an engine dropped without destroy() has stays; of what nobody has, no memory stays."""
    kept, spaces = None, []
    for round in range(4):
        model = Net()
        engine, *_ = unshard.initialize(model=model, config=dense.config(stage))
        engine.backward(loss_of(engine, rank, 0))
        engine.step()
        if round == 0:
            kept = model.up.weight
            value = dense.hex_of([kept.detach().clone()])
        del model, engine, _
        spaces.append(address_space_tib())
    assert dense.hex_of([kept.detach().clone()]) == value
    assert spaces[-1] - spaces[1] < 0.5, spaces             # a segment maps a TiB


@pytest.mark.parametrize("stage", [0, 3])
def test_engines_that_are_dropped_without_destroy_leave_no_memory(stage):
    run_ranks(2, dropped_engines, stage)


def apart(stage):
    """Ranks whose memory isn't shared: each has its own pieces only, and none of another's weights beyond an operator."""
    return dense.config(stage, unshard={"share_memory": "off"}, zero={
        "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0})


def state_of_a_dropped_engine(rank, world):
    model = Net()
    engine, *_ = unshard.initialize(model=model, config=apart(3))
    state = model.state_dict()
    want = dense.hex_of([value.clone() for value in state.values()])
    del model, engine, _
    model = Net()
    engine, *_ = unshard.initialize(model=model, config=apart(3))
    model.load_state_dict(state)
    assert dense.hex_of([value.clone() for value in model.state_dict().values()]) == want
    engine.destroy()


def test_a_state_dict_outlives_its_dropped_engine():
    run_ranks(2, state_of_a_dropped_engine)


def evaluated_later_than_by_others(rank, world, init):
    """Rank 0 has dropped its engine and begun the next one, when rank 1 still reads rank 0's pieces."""
    models = [Net(), None]
    engine, *_ = unshard.initialize(model=models[0], config=apart(3))
    if init:
        with unshard.zero.Init(config_dict_or_path=apart(3)):
            models[1] = Net()
    if rank == 1:
        time.sleep(1)
    with torch.no_grad():
        loss_of(engine, rank, 0)
    del engine, _
    models[0] = None
    engine, *_ = unshard.initialize(model=models[1] or Net(), config=apart(3))
    engine.destroy()


@pytest.mark.parametrize("init", [False, True])
def test_a_dropped_engines_pieces_are_there_until_all_ranks_have_dropped_it(init):
    run_ranks(2, evaluated_later_than_by_others, init)


# ---- the throughput timer ---------------------------------------------------------------------------------------------------------------
def test_the_engine_counts_micro_batches_updates_and_epochs_of_its_throughput_timer():
    """As DeepSpeed 0.19.8 does (recorded). DeepSpeed-Chat calls update_epoch_count() after each epoch."""
    engine, *_ = unshard.initialize(model=nn.Linear(4, 4), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}})
    timer, counts = engine.tput_timer, []
    for _ in range(12):
        with torch.no_grad():
            engine(torch.ones(2, 4))               # no training: not timed
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        counts.append((timer.epoch_count, timer.micro_step_count, timer.global_step_count))
    assert counts == [(0, micro, micro // 2) for micro in range(1, 13)]
    assert timer.batch_size == 4 and timer.avg_samples_per_sec() > 0
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (1, 0, 6)
    engine.destroy()


def test_a_throughput_timer_of_the_scripts_own_takes_deepspeeds_arguments():
    from types import SimpleNamespace

    from deepspeed.utils.timer import ThroughputTimer
    lines = []
    timer = ThroughputTimer(SimpleNamespace(enabled=True, synchronized=False), 4, start_step=1, steps_per_output=2, logging_fn=lines.append)
    for _ in range(4):
        timer.start()
        time.sleep(0.01)
        timer.stop(global_step=True)
    assert len(lines) == 2 and "samples/s over 2 steps" in lines[0] and "samples/s over 4 steps" in lines[1]
    assert 0 < timer.avg_samples_per_sec() <= 400 and (timer.global_step_count, timer.micro_step_count) == (4, 4)
    off = ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), batch_size=None, monitor_memory=True)
    assert off.batch_size == 1
    off.start()
    off.stop(global_step=True)
    assert (off.global_step_count, off.micro_step_count, off.avg_samples_per_sec()) == (0, 0, float("-inf"))
