"""Export to DeepSpeed's universal layout, which DeepSpeed loads at any world size (config checkpoint.load_universal).

    OUT/TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt    a parameter's values, whole
    OUT/TAG/zero/optimizer_state.pt                        hyperparameters, loss scale
    OUT/TAG/*_model_states.pt                              weights in the compute dtype, buffers, counters, schedule, client_state
    OUT/latest_universal                                   the tag

Memory: one tensor at a time, but for client_state and buffers.
"""
import argparse
import collections
import os
import shutil
import sys

import torch

from unshard.checkpoint.opening import open_checkpoint
from unshard.checkpoint.universal_reader import is_universal_folder
from unshard.checkpoint.zero_to_fp32_script import LazyTensor, write_torch_file
from unshard.core import CheckpointError

_DEEPSPEED = "0.19.8"            # whose layout this is
_OPTIONS = {
    "adam": ("lr", "betas", "eps", "weight_decay"), "adamw": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay", "dampening", "nesterov"), "adagrad": ("lr", "lr_decay", "eps", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
}


class _DynamicLossScaler:
    """Pickled under the name of DeepSpeed's class, with its attributes."""


def export_universal(source, folder, with_steps=True, progress=lambda done, total, what: None):
    """Write `source` to the tag's folder `folder`, which appears when it is complete and replaces an older universal one;
    `latest_universal` beside it names it. `with_steps` False leaves out step.pt, as DeepSpeed's converter does for stage 3; its stages 1
    and 2 need it."""
    folder = os.path.normpath(os.fspath(folder))
    if os.path.exists(folder) and not is_universal_folder(folder):
        raise CheckpointError(f"[checkpoint] {folder} exists and isn't a universal checkpoint: give another folder")
    partial = folder + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(os.path.join(partial, "zero"))
    try:
        _write_values(source, os.path.join(partial, "zero"), with_steps, progress)
        _write_optimizer(source, os.path.join(partial, "zero", "optimizer_state.pt"), _param_groups(source))
        _write_model_states(source, partial)
        os.sync()                        # once, rather than each of thousands of small files
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    latest = os.path.join(os.path.dirname(folder) or ".", "latest_universal")
    with open(latest + ".partial", "w") as file:
        file.write(os.path.basename(folder))
    os.replace(latest + ".partial", latest)


def _write_values(source, folder, with_steps, progress):
    trained = [name for name in source.names() if source.parameters[name]["group"] >= 0]
    states = source.contents["optimizer"]["states"]
    if not trained:
        raise CheckpointError(f"[checkpoint] {source.origin} has no trained parameters to convert")
    total = sum(4 * source.numel(name) for name in trained) * (1 + len(states))
    done = 0
    for name in trained:
        parameter = source.parameters[name]
        os.makedirs(os.path.join(folder, name))
        kinds = {"fp32": source.value_kind(name), **{state: state for state in states if state in parameter["kinds"]}}
        for key, kind in kinds.items():
            progress(done, total, f"{name} {key}")
            _write_value(source, os.path.join(folder, name, f"{key}.pt"), kind, name)
            done += 4 * source.numel(name)
        if with_steps:
            write_torch_file(os.path.join(folder, name, "step.pt"), torch.tensor(float(parameter["steps"])), sync=False)
    progress(total, total, "")


def _write_value(source, path, kind, name):
    value = LazyTensor(source.shape(name), lambda: source.read(kind, name).float().reshape(source.shape(name)))
    write_torch_file(path, {"cat_dim": 0, "param": value}, sync=False)


def _param_groups(source):
    """The hyperparameters as torch's optimizers have them."""
    keys = _OPTIONS.get(source.contents["optimizer"]["type"], _OPTIONS["adamw"])
    groups = []
    for i, options in enumerate(source.contents["groups"]):
        values = {**options, "betas": (options.get("beta1", 0.9), options.get("beta2", 0.999))}
        groups.append({**{key: values[key] for key in keys if key in values}, "params": [i]})
    return groups


def _write_optimizer(source, path, groups):
    steps = max((parameter["steps"] for parameter in source.contents["parameters"]), default=0)
    state = {"dynamic_loss_scale": False, "overflow": False, "zero_stage": source.contents["stage"] or 1, "ds_version": _DEEPSPEED,
             "partition_count": [1] * len(groups), "param_groups": groups,
             # What stage 3 reads: the step of the first, the hyperparameters.
             "optimizer_state_dict": {"state": {i: {"step": torch.tensor(float(steps))} for i in range(max(1, len(groups)))},
                                      "param_groups": groups}}
    scaler = source.contents.get("loss_scaler")
    if scaler and scaler["iteration"] > 0:                   # a static scale is the config's
        state["dynamic_loss_scale"] = True
        state["loss_scaler"] = made = _DynamicLossScaler()
        vars(made).update(cur_scale=scaler["scale"], dynamic=True, cur_iter=scaler["iteration"],
                          last_overflow_iter=scaler["last_overflow"], scale_factor=2.0, scale_window=1000, min_scale=1, delayed_shift=2,
                          cur_hysteresis=scaler["hysteresis_left"], consecutive_hysteresis=False, raise_error_at_min_scale=True,
                          dtype=torch.float16)
    write_torch_file(path, state, renamed=[(_DynamicLossScaler, ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"))])


def _write_model_states(source, folder):
    """Twice: with whole weights, for stages 1 and 2, and in stage 3's way with the frozen ones as fragments."""
    state = source.python_state()
    counters = source.contents["counters"]
    shapes = collections.defaultdict(collections.OrderedDict)
    frozen = collections.OrderedDict()
    for name in source.names():
        group = source.parameters[name]["group"]
        (shapes[group] if group >= 0 else frozen)[name] = source.shape(name)
    buffers = source.buffers()
    common = {
        "buffer_names": list(buffers), "optimizer": None, "param_shapes": [shapes[group] for group in sorted(shapes)],
        "frozen_param_shapes": frozen, "shared_params": dict(source.shared), "lr_scheduler": state.get("lr_scheduler"),
        "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": [], "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"], "global_samples": counters["global_samples"], "dp_world_size": 1, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": _config(source), "ds_version": _DEEPSPEED,
    }
    client = {key: value for key, value in (state.get("client_state") or {}).items() if key not in common and key != "module"}
    weights = collections.OrderedDict(buffers)
    for name in source.names():
        weights[name] = _weight(source, name)
    for alias, name in source.shared.items():
        weights[alias] = LazyTensor(weights[name].shape, weights[name].contiguous, weights[name].dtype, same_as=weights[name])
    fragments = collections.OrderedDict((name, _weight(source, name)) for name in frozen)
    write_torch_file(os.path.join(folder, "mp_rank_00_model_states.pt"),
                     {**client, **common, "module": weights, "frozen_param_fragments": fragments})
    empty = collections.OrderedDict((name, value if name in buffers else torch.empty(0, dtype=value.dtype))
                                    for name, value in weights.items())
    flat = collections.OrderedDict((name, _weight(source, name, flat=True)) for name in frozen)
    write_torch_file(os.path.join(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
                     {**client, **common, "module": empty, "frozen_param_fragments": flat})


def _weight(source, name, flat=False):
    """In the compute dtype."""
    dtype, shape = source.compute_dtype(name), (source.numel(name),) if flat else source.shape(name)
    return LazyTensor(shape, lambda: source.weight(name).to(dtype).reshape(shape), dtype)


def _config(source):
    """As much of a DeepSpeed JSON as says how to read this."""
    optimizer, stage = source.contents["optimizer"], source.contents["stage"]
    config = {"gradient_accumulation_steps": source.contents["counters"].get("accumulation_steps") or 1,
              "zero_optimization": {"stage": stage or 1}}
    if optimizer["type"]:
        config["optimizer"] = {"type": optimizer["type"], "params": {}}
    dtypes = {source.parameters[name].get("dtype") for name in source.names() if source.parameters[name]["group"] >= 0}
    for dtype in dtypes & {"fp16", "bf16"}:
        config[dtype] = {"enabled": True}
    return config


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(prog="ds_to_universal", description="Convert a checkpoint to DeepSpeed's universal layout.")
    parser.add_argument("--input_folder", required=True, help="a tag's folder, e.g. checkpoints/global_step10")
    parser.add_argument("--output_folder", required=True, help="the tag's folder to make")
    for name, kind in (("num_extract_workers", int), ("num_merge_workers", int)):
        parser.add_argument(f"--{name}", type=kind, default=1, help="accepted and not used: one pass reads and writes")
    for name in ("keep_temp_folder", "no_strict", "inject_missing_state"):
        parser.add_argument(f"--{name}", action="store_true", help="accepted and not needed")
    return parser.parse_args(argv)


def main(argv=None):
    """`python -m deepspeed.checkpoint.ds_to_universal`."""
    arguments = parse_arguments(argv)
    try:
        convert(arguments)
    except (CheckpointError, OSError) as error:
        print(f"ds_to_universal: {error}", file=sys.stderr)
        return 1
    return 0


def convert(arguments):
    """What the command does, with its parsed arguments."""
    source = open_checkpoint(arguments.input_folder)
    export_universal(source, arguments.output_folder, with_steps=source.contents["stage"] != 3)
    print(f"{arguments.output_folder}: {len(source.names())} parameters in the universal layout")
