"""Importing costs nothing, prints nothing and changes nothing; names come when used."""
import json
import os
import subprocess
import sys

import pytest


def run(code, **env):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("module", ["unshard", "deepspeed"])
def test_import_is_cheap_quiet_and_changes_nothing(module):
    code = f"""
import json, os, signal, sys, time
import torch
before, handlers = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
start = time.perf_counter()
import {module}
took = time.perf_counter() - start
assert dict(os.environ) == before and [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers
print(json.dumps(took))
"""
    done = run(code)
    assert done.stderr == ""
    assert json.loads(done.stdout) <= 0.2


def test_import_alone_loads_neither_torch_nor_the_engine():
    run("import sys, unshard, deepspeed; assert 'torch' not in sys.modules and 'unshard._core' not in sys.modules")


def test_inference_loads_no_torch():
    run("""
import sys
from unshard import _inference
from unshard.inference import commands, llm, replicas
assert 'torch' not in sys.modules, 'torch'
try:
    _inference.InferenceEngine('/no/such/model', {})
except _inference.ModelError as error:
    assert '/no/such/model' in str(error)
from unshard.core import _core
assert _core.ModelError is _inference.ModelError and _core.InferenceEngine is _inference.InferenceEngine
""")


@pytest.mark.parametrize("when", ["before", "after"])
def test_works_across_a_fork(when):
    load = "import torch, unshard; unshard.ConfigError"
    code = f"""
import os
{load if when == "before" else ""}
pid = os.fork()
{load if when == "after" else ""}
import torch, unshard
model = torch.nn.Linear(2, 2)
engine, *_ = unshard.initialize(model=model, config={{"optimizer": {{"type": "SGD"}}, "zero_optimization": {{"stage": 3}}}})
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    run(code, UNSHARD_QUIET="1")


def test_every_name_resolves():
    run("""
import unshard, deepspeed
for module in (unshard, deepspeed):
    for name in module.__all__:
        assert getattr(module, name) is not None or name.startswith("__git"), name
for name in dir(unshard):
    getattr(unshard, name)
""")


def test_names_of_later_work_say_so_and_are_absent_for_hasattr():
    run("""
import deepspeed
for holder, name in ((deepspeed, "pipe"), (deepspeed.moe, "layer"), (deepspeed, "tp_model_init"), (deepspeed.zero, "MiCS_Init"),
                     (deepspeed.ops, "muon")):
    assert not hasattr(holder, name)
    try:
        getattr(holder, name)
    except AttributeError as error:
        assert str(error).startswith(f"{holder.__name__}.{name} is not available in unshard yet: ")
        assert isinstance(error, deepspeed.NotAvailable)
assert not hasattr(deepspeed, "no_such_thing")
""")


@pytest.mark.parametrize("module, name", [
    ("deepspeed", "tp_model_init"), ("deepspeed", "PipelineModule"), ("deepspeed.zero", "MiCS_Init"),
    ("deepspeed.runtime.zero", "MiCS_Init"), ("deepspeed.checkpointing", "CheckpointFunction"),
    ("deepspeed.runtime.utils", "PartitionedTensor")])
def test_a_name_of_later_work_can_be_imported_and_says_so_when_used(module, name):
    run(f"""
from {module} import {name} as later
from {module} import {name} as again
from deepspeed import NotAvailable
def subclass():
    class Own(later):
        pass
for use in (later, lambda: later(model=None), lambda: later.attribute, subclass):
    try:
        use()
    except NotAvailable as error:
        assert str(error).startswith("{module}.{name} is not available in unshard yet: "), error
    else:
        raise AssertionError(use)
assert again is later and not isinstance(1, later) and "{module}.{name}" in repr(later)
""")


@pytest.mark.parametrize("statement, named", [
    ("import deepspeed.pipe", "deepspeed.pipe"), ("from deepspeed.pipe import PipelineModule", "deepspeed.pipe"),
    ("from deepspeed.moe import layer", "deepspeed.moe.layer"), ("import deepspeed.moe.layer", "deepspeed.moe.layer"),
    ("from deepspeed.utils.numa import get_numactl_cmd", "deepspeed.utils.numa"),
    ("import deepspeed.ops.muon", "deepspeed.ops.muon"),
    ("import deepspeed.checkpoint.constants", "deepspeed.checkpoint.constants"),
    ("import deepspeed.profiling", "deepspeed.profiling"),
    ("import deepspeed.sequence.layer", "deepspeed.sequence"), ("import deepspeed.runtime.fp16", "deepspeed.runtime.fp16"),
    ("import deepspeed.runtime.zero.mics", "deepspeed.runtime.zero.mics"), ("import deepspeed.utils.nvtx", "deepspeed.utils.nvtx"),
    ("from deepspeed.comm.ccl import CCLBackend", "deepspeed.comm.ccl"),
    ("from deepspeed.ops.adam.zenflow_cpu_adam import ZenFlowCPUAdam", "deepspeed.ops.adam.zenflow_cpu_adam")])
def test_importing_a_module_of_later_work_fails_with_one_line(statement, named):
    run(f"""
import deepspeed
try:
    {statement}
except ImportError as error:
    assert isinstance(error, deepspeed.NotAvailable)
    assert str(error).startswith("{named} is not available in unshard yet: "), error
    assert len(str(error).splitlines()) == 1
else:
    raise AssertionError("imported")
""")


def test_a_module_that_deepspeed_hasnt_either_is_not_found_as_ever():
    run("""
for name in ("deepspeed.no_such_thing", "deepspeed.zero.no_such_thing"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert error.name == name
try:
    from deepspeed import no_such_thing
except ImportError as error:
    assert "cannot import name" in str(error)
""")


def test_the_pieces_that_scripts_import():
    run("""
import deepspeed
assert deepspeed.__version__.startswith("0.19.8") and deepspeed.__version_major__ == 0
from deepspeed import DeepSpeedEngine, comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.engine import DeepSpeedEngine as again
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WarmupLR
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import RepeatingLoader, groups, log_dist, logger, safe_get_full_fp32_param, set_z3_leaf_modules
assert again is DeepSpeedEngine and deepspeed.runtime.lr_schedules.WarmupLR is WarmupLR
assert deepspeed.comm is dist and not dist.is_initialized()
assert get_accelerator().device_name() in ("cpu", "cuda")
assert sorted(VALID_LR_SCHEDULES) == ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
""")


def test_experts_can_be_asked_for_where_there_are_none():
    """DeepSpeed's own CIFAR tutorial imports this whether it has experts or not. For such models DeepSpeed 0.19.8 gives the same."""
    run("""
import torch
from deepspeed.moe.utils import (configure_moe_param_groups, has_moe_layers, is_moe_param, is_moe_param_group,
    split_params_grads_into_shared_and_expert_params, split_params_into_different_moe_groups_for_optimizer as split,
    split_params_into_shared_and_expert_params)
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
params = list(model.parameters())
group, more = {"params": list(params), "name": "parameters"}, {"params": params[:1], "weight_decay": 0.1, "name": "more"}
assert split(group)[0] is group and split(group) == [{"params": params, "name": "parameters"}]
assert split((group, more)) == split([group, more]) == [{"params": params, "name": "parameters"}, more]
assert configure_moe_param_groups(params) == [{"params": params, "name": "dense-params"}]
assert configure_moe_param_groups([{"params": list(params)}]) == [{"params": params}]
assert has_moe_layers(model) == (False, 0) and not any(map(is_moe_param, params)) and not is_moe_param_group(group)
params[0].grad = torch.ones(3, 2)
assert split_params_grads_into_shared_and_expert_params(params) == ([params[0].grad], [])
assert split_params_into_shared_and_expert_params(params) == (params, [])
params[2].allreduce = False                       # an expert's: told, since its gradients would be summed over all ranks
assert is_moe_param(params[2])
for ask in (lambda: split(group), lambda: configure_moe_param_groups(params), lambda: split_params_into_shared_and_expert_params(params)):
    try:
        ask()
    except NotImplementedError as error:
        assert "parameter 2 of 4, of shape (1, 3), is marked as an expert's" in str(error)
    else:
        raise AssertionError(ask)
try:
    configure_moe_param_groups(group)
except ValueError as error:
    assert "wanted a list" in str(error)
else:
    raise AssertionError("one group was taken for a list of parameters")
""")


def test_modules_are_read_and_replaced_by_their_names():
    """DeepSpeed-Chat does its LoRA with these, under the older of the two paths."""
    run("""
import torch
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.utils import module_utils
assert (module_utils.recursive_getattr, module_utils.recursive_setattr) == (recursive_getattr, recursive_setattr)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 3)))
assert recursive_getattr(model, "1.0") is model[1][0] and recursive_getattr(model, "1.0.weight") is model[1][0].weight
recursive_setattr(model, "1.0", torch.nn.ReLU())
recursive_setattr(model, "0", torch.nn.GELU())
assert isinstance(model[1][0], torch.nn.ReLU) and isinstance(model[0], torch.nn.GELU)
try:
    recursive_getattr(model, "1.7")
except AttributeError as error:
    assert "has no attribute '7'" in str(error)
else:
    raise AssertionError("found")
""")


def test_config_show_prints_keys_values_and_origins(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    command = [sys.executable, "-m", "unshard.cli", "config", "show", str(file), "--world-size", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert lines["train_batch_size"][0] == "8" and lines["zero_optimization.stage"][0] == "2"
    assert lines["train_micro_batch_size_per_gpu"][:2] == ["4", "derived"]
    file.write_text('{"zero_optimisation": {"stage": 2}}')
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "zero_optimization" in done.stderr and "Traceback" not in done.stderr


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "unshard", *arguments], capture_output=True, text=True, timeout=60)


def test_the_command_says_its_version_and_what_it_needs():
    import unshard
    version = command("--version")
    assert version.returncode == 0 and version.stdout == f"unshard {unshard.__version__}\n"
    for argument, words in (("run", "the following arguments are required: SCRIPT\n"), ("no_such_thing", "invalid choice")):
        done = command(argument)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_model_in_the_place_of_args_is_told_so():
    import torch
    import unshard
    with pytest.raises(ValueError, match="the first positional argument is `args`: write model="):
        unshard.initialize(torch.nn.Linear(2, 2), {"train_batch_size": 1})
