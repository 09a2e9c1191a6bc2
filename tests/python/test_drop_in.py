"""deepspeed's helpers around the engine: each does what its name says, or gives what the plain computation gives."""
import argparse
import contextlib
import io
import json
import math
import os
import subprocess
import sys
import types

import pytest
import torch
from ranks import run_ranks

import deepspeed
import unshard

NAMES = {
    "deepspeed": "initialize init_distributed add_config_arguments zero comm checkpointing ops utils runtime accelerator monitor launcher "
                 "checkpoint DeepSpeedEngine DeepSpeedConfig DeepSpeedConfigError DeepSpeedOptimizer DeepSpeedDataLoader OnDevice log_dist "
                 "logger dist get_accelerator HAS_TRITON __version__ __version_major__ __version_minor__ __version_patch__",
    "deepspeed.zero": "Init GatheredParameters register_external_parameter unregister_external_parameter TiledLinear TiledLinearReturnBias "
                      "ZeroParamStatus ZeroParamType unwrap_model_for_generation",
    "deepspeed.runtime.zero.stage3": "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold",
    "deepspeed.runtime.zero.stage_1_and_2": "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold",
    "deepspeed.runtime.zero.partition_parameters": "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange get_accelerator",
    "deepspeed.utils": "safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_grad safe_set_full_grad "
                       "safe_get_full_optimizer_state safe_set_full_optimizer_state safe_get_local_fp32_param safe_set_local_fp32_param "
                       "safe_get_local_grad safe_set_local_grad safe_get_local_optimizer_state safe_set_local_optimizer_state "
                       "safe_update_full_grad_vectorized set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module "
                       "z3_leaf_parameter set_z3_leaf_module set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix logger log_dist "
                       "OnDevice RepeatingLoader groups log_dist_once set_log_level_from_string recursive_getattr recursive_setattr",
    "deepspeed.utils.tensor_fragment": "safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
                                       "safe_get_local_grad safe_update_full_grad_vectorized",
    "deepspeed.utils.groups": "_get_data_parallel_group _get_sequence_parallel_group _get_expert_parallel_group",
    "deepspeed.utils.logging": "logger log_dist log_dist_once get_current_level",
    "deepspeed.runtime.utils": "see_memory_usage clip_grad_norm_ move_to_device",
    "deepspeed.comm": "is_initialized is_available init_distributed get_rank get_world_size get_local_rank get_global_rank get_world_group "
                      "get_all_ranks_from_group new_group destroy_process_group barrier monitored_barrier broadcast broadcast_object_list "
                      "all_reduce inference_all_reduce all_reduce_coalesced reduce reduce_scatter reduce_scatter_tensor reduce_scatter_fn "
                      "all_gather all_gather_into_tensor allgather_fn all_gather_coalesced all_gather_object all_to_all all_to_all_single "
                      "gather scatter send recv isend irecv P2POp batch_isend_irecv ReduceOp initialize_mesh_device configure log_summary "
                      "reset_log has_comm_data get_logged_comm_ops",
    "deepspeed.checkpointing": "checkpoint configure is_configured reset non_reentrant_checkpoint model_parallel_cuda_manual_seed "
                               "get_cuda_rng_tracker",
    "deepspeed.ops.adam": "FusedAdam DeepSpeedCPUAdam",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion": "FusedLion DeepSpeedCPULion", "deepspeed.ops.lamb": "FusedLamb",
    "deepspeed.runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest add_tuning_arguments VALID_LR_SCHEDULES",
    "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
    "deepspeed.monitor.monitor": "MonitorMaster", "deepspeed.accelerator": "get_accelerator",
    "deepspeed.launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME main",
}
ENGINE = """forward backward scale step is_gradient_accumulation_boundary set_gradient_accumulation_boundary no_sync coalesce_grad_reduction
    zero_grad clip_fp32_gradients allreduce_gradients get_global_grad_norm was_step_applied train eval save_checkpoint load_checkpoint
    save_16bit_model save_fp16_model module_state_dict load_module_state_dict state_dict _zero3_consolidated_16bit_state_dict
    _consolidated_16bit_state_dict compile is_compiled offload_states reload_states empty_partition_cache destroy collect_python_gc
    deepspeed_io set_train_batch_size set_train_micro_batch_size get_batch_info train_batch_size train_micro_batch_size_per_gpu
    gradient_accumulation_steps zero_optimization zero_optimization_stage fp16_enabled bfloat16_enabled gradient_clipping loss_scale
    dynamic_loss_scale get_lr get_type get_mom steps_per_print wall_clock_breakdown zero_offload_optimizer
    zero_gather_16bit_weights_on_model_save get_data_types module optimizer basic_optimizer lr_scheduler training_dataloader config device
    local_rank global_rank world_size dp_world_size mp_world_size data_parallel_group global_steps global_samples micro_steps skipped_steps
    loaded_checkpoint_tag monitor timers mpu client_optimizer data_iterator get_wall_clock_timers memory_breakdown dump_state
    has_moe_layers pipeline_parallelism sequence_parallel_size seq_dp_world_size data_sampling_enabled random_ltd_enabled
    curriculum_learning_enabled""".split()


def small_engine(**config):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    return deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "optimizer": {
        "type": "Adam", "params": {"lr": 0.25}}, **config})[0]


def steps(engine, count):
    for _ in range(count):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()


def test_every_name_of_the_reference_is_there_whichever_module_is_imported_first():
    code = f"""
import importlib, os, sys, torch
for module, names in {NAMES!r}.items():
    child = os.fork()
    if child == 0:
        try:
            found = importlib.import_module(module)
            missing = [name for name in names.split() if getattr(found, name, None) is None]
            assert not missing, (module, missing)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, module
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == done.stderr == "", done.stderr


def test_attribute_chains_work_after_a_plain_import():
    code = ("import deepspeed\nassert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES and deepspeed.comm.is_initialized() is False\n"
            "assert deepspeed.ops.adam.FusedAdam and deepspeed.utils.logger.setLevel(10) is None\n"
            "assert deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs and deepspeed.monitor.monitor.MonitorMaster\n"
            "assert deepspeed.accelerator.get_accelerator().current_device_name()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_engine_has_every_member_of_the_reference_and_its_getters_answer():
    engine = small_engine(zero_optimization={"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000})
    missing = [name for name in ENGINE if not hasattr(engine, name)]
    assert not missing
    for name in dir(type(engine)):
        if name.startswith(("zero_", "checkpoint_")) and name != "zero_grad" or name.endswith("_enabled"):
            getattr(engine, name)()
    assert engine.zero_reduce_bucket_size() == 1000 and engine.zero_overlap_comm() and engine.zero_reduce_scatter()
    assert engine.communication_data_type == torch.float32
    assert small_engine(bf16={"enabled": True}).communication_data_type == torch.bfloat16
    assert small_engine(communication_data_type="fp16").communication_data_type == torch.float16
    assert engine.param_names == {p: name for name, p in engine.module.named_parameters()}
    engine.destroy()


def test_train_and_eval_return_none_as_in_deepspeed_and_the_engine_in_unshard():
    engine = small_engine()
    assert engine.eval() is None and not engine.module.training and engine.train() is None and engine.module.training
    own = unshard.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1})[0]
    assert own.eval() is own and own.train() is own
    assert type(engine).__name__ == "DeepSpeedEngine" and type(engine) is deepspeed.DeepSpeedEngine


def test_the_getters_of_the_loss_scale_answer_from_the_json_as_in_deepspeed():
    dynamic, static = small_engine(), small_engine(fp16={"enabled": True, "loss_scale": 8})
    assert (dynamic.loss_scale(), dynamic.dynamic_loss_scale(), dynamic.get_type()) == (0, True, [0.0])
    assert (static.loss_scale(), static.dynamic_loss_scale(), static.optimizer.cur_scale) == (8, False, 8)
    own = unshard.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1})[0]
    assert (own.loss_scale(), own.dynamic_loss_scale()) == (1, False)


def test_what_a_load_leaves_alone_is_what_deepspeed_leaves_alone(tmp_path):
    """The rate is the optimizer's state, and micro-batches are those of this run; recorded from DeepSpeed 0.19.8."""
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}
    saved = small_engine(scheduler=section, gradient_accumulation_steps=2)
    steps(saved, 8)
    saved.save_checkpoint(tmp_path)

    def facts(**options):
        engine = small_engine(scheduler=section, gradient_accumulation_steps=2)
        engine.load_checkpoint(tmp_path, **options)
        return engine, (engine.get_lr(), engine.lr_scheduler.last_batch_iteration, engine.global_steps, engine.micro_steps)
    rate = pytest.approx([0.015474112289381661])
    assert facts()[1] == (rate, 3, 4, 0)
    assert facts(load_lr_scheduler_states=False)[1] == (rate, -1, 4, 0)
    engine, found = facts(load_optimizer_states=False)
    assert found == ([0.0], 3, 4, 0)
    steps(engine, 2)
    assert engine.get_lr() == pytest.approx([0.01796488803407854]) and (engine.global_steps, engine.micro_steps) == (5, 2)


# ---- monitors ----------------------------------------------------------------------------------------------------------------------
def test_csv_files_hold_the_rate_at_every_update_and_go_on_where_they_were(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = small_engine(csv_monitor=section)
    steps(engine, 2)
    engine.monitor.write_events([("My/metric", torch.tensor(0.5), 7)])
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text() == "step,lr\n2,0.25\n4,0.25\n"
    assert (tmp_path / "job" / "My_metric.csv").read_text() == "step,metric\n7,0.5\n"
    again = deepspeed.monitor.monitor.MonitorMaster(deepspeed.DeepSpeedConfig({"csv_monitor": section}).monitor_config)
    again.write_events([("My/metric", 1.5, 8)])
    assert (tmp_path / "job" / "My_metric.csv").read_text() == "step,metric\n7,0.5\n8,1.5\n"
    assert not deepspeed.monitor.monitor.MonitorMaster(deepspeed.DeepSpeedConfig({}).monitor_config).enabled


def test_times_and_the_loss_scale_are_written_where_they_are_measured(tmp_path):
    engine = small_engine(csv_monitor={"enabled": True, "output_path": str(tmp_path)}, fp16={"enabled": True, "loss_scale": 8},
                          wall_clock_breakdown=True, steps_per_print=1)
    engine.backward(engine(torch.ones(2, 4, dtype=torch.half)).sum())
    engine.step()
    folder = tmp_path / "DeepSpeedJobName"
    assert (folder / "Train_Samples_loss_scale.csv").read_text() == "step,loss_scale\n2,8.0\n"
    step, value = (folder / "Train_Samples_elapsed_time_ms_backward.csv").read_text().splitlines()[1].split(",")
    assert step == "2" and float(value) > 0


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_told_before_anything_starts(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=rf"{name}.enabled is true, but the package {name} isn't installed"):
        small_engine(**{name: {"enabled": True}})


def test_wandb_gets_the_project_and_the_scalars(monkeypatch):
    calls = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace(origin="fake")
    fake.init = lambda **keywords: calls.append(keywords)
    fake.log = lambda data, step, commit: calls.append((data, step))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    steps(small_engine(wandb={"enabled": True, "project": "p", "team": "t"}), 1)
    assert calls == [{"project": "p", "group": None, "entity": "t"}, ({"Train/Samples/lr": 0.25}, 2)]


def test_tensorboard_gets_the_scalars(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, log_dir):
            written.append(log_dir)

        def add_scalar(self, *event):
            written.append(event)

        def flush(self):
            written.append("flushed")
    board = types.ModuleType("tensorboard")
    board.__spec__ = types.SimpleNamespace(origin="fake")
    torch_board = types.ModuleType("torch.utils.tensorboard")
    torch_board.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboard", board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", torch_board)
    steps(small_engine(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "j"}), 1)
    assert written == [str(tmp_path / "j"), ("Train/Samples/lr", 0.25, 2), "flushed"]


# ---- the log of communication --------------------------------------------------------------------------------------------------------
def logs_communication(rank, world):
    import deepspeed.comm as dist
    dist.init_distributed(config={"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}})
    dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(8))
    dist.barrier()
    assert dist.get_logged_comm_ops() == ["all_reduce"] and dist.get_comm_operation_count() == 2
    dist.configure(prof_all=True, debug=True)
    out = torch.empty(8)
    dist.all_gather_into_tensor(out, torch.full((4,), float(rank)))
    dist.all_gather_coalesced([out], [torch.full((4,), float(rank))], log_name="mine")
    assert out.tolist() == [0.0] * 4 + [1.0] * 4
    tensors = [torch.ones(2), torch.ones(3)]
    dist.all_reduce_coalesced(tensors)
    assert [t.sum().item() for t in tensors] == [4, 6]
    found = dist.log_summary(show_straggler=True, return_dict=True)
    calls = {name: {size: row["count"] for size, row in sizes.items()} for name, sizes in found["summary"].items()}
    row = found["summary"]["all_reduce"][32]
    assert row["avg_latency_ms"] == row["total_latency_ms"] / 2 > 0 and found["metadata"]["world_size"] == 2
    late = found["straggler_analysis"]["all_reduce"][32]
    assert math.isclose(late["total_comm_lat_ms"] + late["total_straggler_ms"], row["total_latency_ms"], rel_tol=1e-6)
    dist.reset_log()
    assert not dist.has_comm_data()
    dist.configure(enabled=False)
    small_engine(comms_logger={"enabled": True, "prof_all": True})
    assert dist.comm.comms_logger.enabled
    mesh = dist.initialize_mesh_device((world,), ("data",))
    assert mesh.get_group("data").size() == world and dist.get_all_ranks_from_group() == [0, 1]
    return calls


def test_calls_of_comm_are_counted_by_operation_and_size():
    mine = "logs_communication"
    assert run_ranks(2, logs_communication)[0] == {
        "all_reduce": {"32": 2}, f"all_gather_into_tensor | {mine}": {"16": 1}, f"mine | {mine}": {"16": 1},
        f"all_reduce_coalesced | {mine}": {"20": 1}}


def calls_with_deepspeeds_argument_names(rank, world):
    import deepspeed.comm as dist
    dist.init_distributed()
    gathered, piece, swapped, got = torch.zeros(4), torch.zeros(2), torch.zeros(4), torch.zeros(1)
    dist.all_gather_into_tensor(output_tensor=gathered, tensor=torch.full((2,), rank + 1.0))
    dist.reduce_scatter_tensor(output_tensor=piece, tensor=torch.arange(4.0))
    dist.all_to_all_single(output=swapped, tensor=torch.full((4,), rank + 1.0))
    other = 1 - rank
    exchange = [dist.P2POp(dist.isend, torch.full((1,), rank + 1.0), other), dist.P2POp(dist.irecv, got, peer=other)]
    for request in dist.batch_isend_irecv(exchange):
        request.wait()
    return [gathered.tolist(), piece.tolist(), swapped.tolist(), got.item()]


def test_calls_of_comm_take_deepspeeds_argument_names_and_point_to_point_operations():
    both = [1, 1, 2, 2]
    assert run_ranks(2, calls_with_deepspeeds_argument_names) == [[both, [0, 2], both, 2], [both, [4, 6], both, 1]]


def test_bandwidths_have_nccl_tests_factors():
    from unshard.comms_logger import bandwidths
    megabyte_in_8_ms = 1e6, 8.0
    assert bandwidths("all_reduce", *megabyte_in_8_ms, 4) == pytest.approx((2, 1.5))
    assert bandwidths("all_gather_into_tensor", *megabyte_in_8_ms, 4) == pytest.approx((4, 3))
    assert bandwidths("all_to_all_single", *megabyte_in_8_ms, 4) == pytest.approx((1, 0.75))
    assert bandwidths("broadcast", *megabyte_in_8_ms, 4) == pytest.approx((1, 1))


# ---- activation checkpointing --------------------------------------------------------------------------------------------------------
@pytest.fixture
def checkpointing():
    deepspeed.checkpointing.reset()
    yield deepspeed.checkpointing
    deepspeed.checkpointing.reset()
    deepspeed.checkpointing.get_cuda_rng_tracker().reset()


@pytest.mark.parametrize("switches", [{}, {"checkpoint_in_cpu": True}, {"profile": True}, {"partition_activations": True},
                                      {"deepspeed_config": {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}}])
def test_checkpointed_gradients_are_the_plain_ones_and_forward_runs_twice(checkpointing, switches):
    assert not checkpointing.is_configured()
    checkpointing.configure(None, **switches)
    assert checkpointing.is_configured()
    runs, layer = [], torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(6, 6))

    def block(x, scale=1.0):
        runs.append(1)
        return layer(x) * scale
    x = torch.randn(3, 6, requires_grad=True)
    torch.manual_seed(1)
    block(x).sum().backward()
    wanted = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
    for call in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        x.grad = None
        layer.zero_grad()
        torch.manual_seed(1)
        before = len(runs)
        call(block, x).sum().backward()
        assert len(runs) - before == 2 and all(map(torch.equal, [x.grad, *(p.grad for p in layer.parameters())], wanted))


def test_named_random_states_go_on_by_themselves_and_recomputation_draws_the_same(checkpointing):
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker, outside = checkpointing.get_cuda_rng_tracker(), torch.manual_seed(5)
    first = torch.rand(3)
    with tracker.fork():
        inside = torch.rand(3)
    torch.manual_seed(5 + 2718)
    assert torch.equal(inside, torch.rand(3)) and not torch.equal(first, inside) and outside is torch.default_generator
    with tracker.fork():
        assert not torch.equal(torch.rand(3), inside)

    masks = []

    def block(x):
        with tracker.fork():
            masks.append(torch.rand(4))
        return x * masks[-1]
    x = torch.ones(4, requires_grad=True)
    checkpointing.checkpoint(block, x).sum().backward()
    assert torch.equal(masks[0], masks[1]) and torch.equal(x.grad, masks[0])
    with pytest.raises(ValueError, match="there is no state named 'other'"), tracker.fork("other"):
        pass
    with pytest.raises(ValueError, match="a state named 'model-parallel-rng' already"):
        tracker.add("model-parallel-rng", 99)


def test_contiguous_checkpointing_without_what_it_needs_is_refused(checkpointing):
    with pytest.raises(ValueError, match="contiguous checkpointing needs partition_activations"):
        checkpointing.configure(None, contiguous_checkpointing=True)
    assert not checkpointing.is_configured()


# ---- layers, devices, numbers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("in_splits, out_splits, bias", [(1, 1, True), (3, 2, True), (7, 5, True), (2, 3, False)])
def test_a_tiled_layer_is_the_linear_layer(in_splits, out_splits, bias):
    dense = torch.nn.Linear(7, 5, bias=bias).double()
    tiled = deepspeed.zero.TiledLinear(7, 5, bias=bias, in_splits=in_splits, out_splits=out_splits, init_linear=dense, dtype=torch.float64)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(tiled(x), dense(x))
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in dense.parameters())
    assert [k for k in tiled.state_dict() if k.endswith("bias")] == [f"linears.{i}.{in_splits - 1}.bias" for i in range(out_splits * bias)]
    assert len(tiled.in_parts) == in_splits + 1 and tiled.in_parts[-1] == 7 and tiled.out_parts[-1] == 5
    parts = deepspeed.zero.TiledLinear(7, 5, bias=bias, in_splits=in_splits, out_splits=out_splits, input_is_already_split=True,
                                       combine_out_splits=False, init_linear=dense, dtype=torch.float64)
    torch.testing.assert_close(torch.cat(parts(torch.split(x, [t.in_features for t in tiled.linears[0]], -1)), -1), dense(x))


def test_a_tiled_layer_returns_the_bias_that_its_tiles_return():
    class Returns(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight), self.bias
    dense = torch.nn.Linear(6, 4)
    tiled = deepspeed.zero.TiledLinearReturnBias(6, 4, in_splits=2, out_splits=2, linear_cls=Returns, init_linear=dense)
    value, bias = tiled(torch.ones(3, 6))
    torch.testing.assert_close(value + bias, dense(torch.ones(3, 6)))
    apart = deepspeed.zero.TiledLinearReturnBias(6, 4, out_splits=2, input_is_already_split=True, combine_out_splits=False,
                                                 linear_cls=Returns, init_linear=dense)
    torch.testing.assert_close(torch.cat([value + bias for value, bias in apart(torch.ones(3, 6))], -1), dense(torch.ones(3, 6)))
    with pytest.raises(ValueError, match="in_splits=7 isn't between 1 and the 6"):
        deepspeed.zero.TiledLinear(6, 4, in_splits=7)


def test_marks_of_leaf_modules_are_returned_as_by_deepspeed():
    from deepspeed import utils
    layer, model = torch.nn.Linear, torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))
    assert utils.set_z3_leaf_modules(model, ["Sequential"]) == [model[0], model]                # children before parents
    assert utils.get_z3_leaf_modules(model) == [model, model[0]] and utils.z3_leaf_parameter(model[1].bias)
    assert utils.unset_z3_leaf_modules(model, [torch.nn.Sequential, layer]) == [model[0][0], model[0], model[1], model]
    assert not utils.get_z3_leaf_modules(model) and not utils.z3_leaf_parameter(model[1].bias)
    assert utils.set_z3_leaf_modules_by_name(model, ["1", "x"], raise_if_not_found=False) == ([model[1]], ["x"])
    assert utils.set_z3_leaf_modules_by_suffix(model, [".0", "0"]) == ([model[0][0], model[0]], [])
    assert utils.set_z3_leaf_modules_by_name(model, ["0.0"], False) == ([model[0][0]], [])
    assert utils.get_z3_leaf_modules(model) == [model[0], model[1]]
    with pytest.raises(ValueError, match="has no module 'x'"):
        utils.set_z3_leaf_modules_by_name(model, ["1", "x"])
    with pytest.raises(ValueError, match="types or names of types, got 3"):
        utils.set_z3_leaf_modules(model, [3])
    assert utils.set_z3_leaf_modules(model, ["Conv"], raise_if_not_found=False) == []


def test_on_device_builds_without_values_and_in_another_dtype():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(4, 4)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    with deepspeed.OnDevice(dtype=torch.float16, device="meta", enabled=False):
        assert torch.nn.Linear(1, 1).weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm_is_torchs(norm_type, max_norm):
    from deepspeed.runtime.utils import clip_grad_norm_
    both = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 5)
        layer(torch.randn(4, 3)).square().sum().backward()
        both.append((clip(layer.parameters(), max_norm, norm_type).item(), [p.grad for p in layer.parameters()]))
    assert both[0][0] == pytest.approx(both[1][0])
    for mine, torchs in zip(both[0][1], both[1][1]):
        torch.testing.assert_close(mine, torchs)


def test_clones_are_small_and_each_has_memory_of_its_own():
    base = torch.zeros(1000)
    state = {"view": base[:10], "tied": [base[:10]], "number": 3, "matrix": torch.ones(2, 3).t()}
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(state)
    assert copied["view"].untyped_storage().nbytes() == copied["tied"][0].untyped_storage().nbytes() == 40 and copied["number"] == 3
    copied["view"].fill_(1)
    assert base.sum() == copied["tied"][0].sum() == 0 and torch.equal(copied["matrix"], state["matrix"])


# ---- memory --------------------------------------------------------------------------------------------------------------------------
def measured(rank, world, stage):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    total = sum(p.numel() for p in model.parameters())
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True},
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum())
    engine.step()
    report = engine.memory_report()
    return [total, 64 * 64 + 64, report["parameters"] + report["gradients"] + report["optimizer"]]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_memory_estimates_are_the_bytes_that_the_engine_holds(stage):
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    for total, layer, held in run_ranks(2, measured, stage):
        if stage == 2:
            _, device = stage_1_and_2.estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=2, cpu_offload=False)
        else:
            _, device, live = stage3.estimate_zero3_model_states_mem_needs(total, layer, 2, 1, cpu_offload=False, cpu_offload_params=False)
            device -= live
        assert held == device


def test_the_estimators_print_a_table_for_a_model_or_for_numbers():
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    tables = []
    for call in (lambda: stage3.estimate_zero3_model_states_mem_needs_all_live(torch.nn.Linear(1000, 1999), num_gpus_per_node=4),
                 lambda: stage3.estimate_zero3_model_states_mem_needs_all_cold(1999 * 1001, 1999 * 1001, num_gpus_per_node=4)):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            call()
        tables.append(out.getvalue())
    assert tables[0] == tables[1] and "2M parameters" in tables[0] and len(tables[0].splitlines()) == 8
    with contextlib.redirect_stdout(io.StringIO()) as out:
        stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(10**9, 8, 2)
    assert f"{(2e9 + 16e9 / 16) / 2**30:.2f}GB  | offload_optimizer=none\n" in out.getvalue()


def parameter_methods(rank, world):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    wanted = model[0].weight.detach().clone()
    torch.distributed.init_process_group("gloo") if not torch.distributed.is_initialized() else None
    torch.distributed.broadcast(wanted, 0)
    engine = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 0}, "optimizer": {"type": "Adam"}})[0]
    p = model[0].weight
    assert p.ds_status.name == "NOT_AVAILABLE" and p.partition_numel() == 512 and p.ds_tensor.numel() == 512
    p.all_gather()
    assert p.ds_status.name == "AVAILABLE" and (p.detach().numpy() == wanted.numpy()).all()
    p.partition()
    assert p.ds_status.name == "NOT_AVAILABLE" and p.ds_summary()["ds_shape"] == (32, 32)
    with deepspeed.zero.unwrap_model_for_generation(engine) as bare:
        assert bare is model and bare[1].weight.detach().numpy().shape == (32, 32)
    plain = torch.nn.Linear(1, 1).weight
    return [hasattr(plain, "all_gather"), hasattr(plain, "ds_id"), engine.zero_optimization_stage()]


def test_partitioned_parameters_have_deepspeeds_methods_and_others_have_not():
    assert run_ranks(2, parameter_methods) == [[False, False, 3]] * 2


def test_libraries_that_take_hooks_off_and_on_around_generation_find_none():
    # What TRL does at stage 3 before and after it generates.
    engine = small_engine(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    offload = engine.optimizer.parameter_offload
    walked = [p for _, p in (*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters())]
    assert [id(p) for p in walked] == [id(p) for p in engine.module.parameters()]
    for p in walked:
        p.ds_active_sub_modules.clear()
    assert [*offload.forward_hooks, *offload.backward_hooks] == [] and not hasattr(offload, "param_coordinator")
    offload.forward_hooks, offload.backward_hooks = [], []
    offload._register_deepspeed_module(offload.module)
    steps(engine, 1)
    engine.destroy()
    other = small_engine(zero_optimization={"stage": 2})
    assert not hasattr(other.optimizer, "parameter_offload")
    other.destroy()


def test_an_engines_optimizer_is_one_of_deepspeeds_and_of_torchs():
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
    optimizer = small_engine(zero_optimization={"stage": 1}).optimizer
    kinds = DeepSpeedOptimizer, ZeROOptimizer, deepspeed.DeepSpeedOptimizer, torch.optim.Optimizer
    assert all(isinstance(optimizer, kind) for kind in kinds)
    assert not isinstance(torch.optim.SGD([torch.zeros(1)], lr=1), DeepSpeedOptimizer)


# ---- the rest ------------------------------------------------------------------------------------------------------------------------
def test_the_configuration_as_an_object():
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
                                        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}})
    assert (config.train_micro_batch_size_per_gpu, config.zero_optimization_stage, config.zero_enabled) == (4, 2, True)
    assert (config.optimizer_name, config.optimizer_params, config.bfloat16_enabled) == ("adamw", {"lr": 0.1}, True)
    assert config.gradient_clipping == 1.0
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="zero_optimization"):
        deepspeed.DeepSpeedConfig({"zero_optimisation": {}})


def test_the_schedules_options_have_deepspeeds_defaults():
    from deepspeed.runtime.lr_schedules import add_tuning_arguments
    given = add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--lr_schedule", "WarmupLR", "--warmup_num_steps", "7"])
    assert (given.lr_schedule, given.warmup_num_steps, given.cycle_max_lr, given.lr_range_test_staircase) == ("WarmupLR", 7, 0.1, False)


def test_the_accelerator_answers():
    accelerator = deepspeed.accelerator.get_accelerator()
    assert accelerator is deepspeed.get_accelerator() and accelerator.device_name() == accelerator.device().type
    assert 0 < accelerator.memory_allocated() <= accelerator.max_memory_allocated() and accelerator.available_memory() > 0
    state = accelerator.get_rng_state()
    first = torch.rand(2, device=accelerator.current_device_name())
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(2, device=accelerator.current_device_name()), first)
    with accelerator.stream(accelerator.current_stream()):
        accelerator.synchronize()
    assert accelerator.FloatTensor([1.0, 2.0]).dtype == torch.float32


def test_timers_add_up_and_complain():
    timers = deepspeed.utils.timer.SynchronizedWallClockTimer()
    for _ in range(2):
        timers("forward").start()
        timers("forward").stop()
    assert timers.has_timer("forward") and timers("forward").elapsed(reset=False) == pytest.approx(2 * timers("forward").mean())
    assert timers.get_mean(["forward"])["forward"] > 0 and timers("forward").elapsed() == 0
    with pytest.raises(RuntimeError, match="stop\\(\\) without a start"):
        timers("forward").stop()


def test_log_level_and_memory_breakdown_of_the_json_count(caplog):
    import gc
    deepspeed.logger.propagate = True
    try:
        small_engine(memory_breakdown=True, log_level="info", steps_per_print=1)
        assert any("memory when the engine is made" in r.message and "process" in r.message for r in caplog.records)
        engine = small_engine(log_level="error", disable_python_gc=True)
        assert deepspeed.logger.level == 40 and not gc.isenabled()
        engine.collect_python_gc()
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="log_level"):
            small_engine(log_level="loud")
    finally:
        gc.enable()
        deepspeed.logger.propagate = False
        deepspeed.logger.setLevel(20)


def test_ds_report_is_unshards_report():
    done = subprocess.run([sys.executable, "-m", "deepspeed.env_report", "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["software"]["unshard"] == unshard.__version__, done.stderr


def test_ds_ssh_runs_a_command_on_every_host_and_tells_who_failed(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\necho "on $1: $2"\n[ "$1" != second ]\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("first slots=2\nsecond slots=1  # no more\n")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def ds_ssh(*words):
        command = [sys.executable, "-m", "deepspeed.launcher.ds_ssh", *words]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    done = ds_ssh("-f", str(tmp_path / "hosts"), "ls", "-l", "a b")
    assert sorted(done.stdout.splitlines()) == ["first: on first: ls -l 'a b'", "second: on second: ls -l 'a b'"] and done.returncode == 1
    here = ds_ssh("-f", str(tmp_path / "none"), "echo", "here")
    assert (here.stdout, here.returncode) == ("here\n", 0) and "there is no hostfile" in here.stderr
    (tmp_path / "hosts").write_text("first\n")
    assert "is not of the form 'name slots=N'" in ds_ssh("-f", str(tmp_path / "hosts"), "ls").stderr


def test_hugging_face_sees_a_deepspeed_it_accepts():
    import importlib.metadata
    from packaging.version import Version
    assert Version(importlib.metadata.version("deepspeed")) >= Version("0.19.6")
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__
