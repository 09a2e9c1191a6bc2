"""Where DeepSpeed puts which elements of which parameter, for each ZeRO stage: tables of pieces for `Source`.

Stage 0: whole tensors; the optimizer's are numbered, not named.
Stages 1 and 2: the parameters of a group are laid end to end and cut in one run for each rank; each rank's file says which parameter lies
where in its run.
Stage 3: each parameter is padded to a multiple of the ranks and cut; a rank's cuts are laid end to end in the order of param_shapes, in one
buffer for each sub-group.
"""
import collections
import math

import torch

from unshard.checkpoint.pickle_classes import Foreign
from unshard.checkpoint.source import DTYPE_NAMES, Piece
from unshard.checkpoint.stage0_names import names_of_groups
from unshard.checkpoint.stored_tensor import StoredTensor
from unshard.checkpoint.torch_file import loaded
from unshard.core import CheckpointError

_OPTIONS = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay", "momentum": "momentum", "dampening": "dampening",
            "lr_decay": "lr_decay", "initial_accumulator_value": "initial_accumulator", "nesterov": "nesterov",
            "bias_correction": "bias_correction", "maximize": "maximize"}


def config(model):
    found = model.get("ds_config")
    return found if isinstance(found, dict) else {}


class Saved:
    """A checkpoint's files, read as data, and what they say about the run."""

    def __init__(self, folder, stage, model, model_files, optimizer_files, group_names):
        self.folder, self.stage, self.model = folder, stage, model
        self.model_files, self.optimizer_files, self.group_names = model_files, optimizer_files, group_names
        self.module = self.take(model, "module", dict)

    def fail(self, what):
        raise CheckpointError(f"[checkpoint] {self.folder}: {what}")

    def take(self, holder, key, kinds):
        value = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(value, kinds):
            self.fail(f"its states have no usable {key!r}")
        return value

    def inner(self, rank=0):
        """The state dict of the optimizer that DeepSpeed wraps: of a rank, or (stage 0) the only one."""
        if self.stage == 0:
            outer = self.model.get("optimizer")
            return outer.get("optimizer_state_dict", outer) if isinstance(outer, dict) else {"state": {}, "param_groups": []}
        found = self.optimizer_files[rank].get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if isinstance(found, list):                       # elastic_checkpoint: the states alone, a dict for each group
            found = {"state": dict(enumerate(found)), "param_groups": []}
        self.take(found, "state", dict)
        return found

    def states(self, rank, index):
        """{name: flat StoredTensor} of the optimizer's `index`-th buffer (parameter at stage 0)."""
        found = self.inner(rank)["state"].get(index, {})
        return {name: value for name, value in found.items() if isinstance(value, StoredTensor) and value.shape and name != "step"}

    def steps(self, index):
        """Updates of the optimizer's `index`-th buffer. An optimizer that doesn't count has made as many as the engine."""
        state = self.inner()["state"].get(index)
        step = loaded(state.get("step")) if isinstance(state, dict) else None
        if step is None:
            step = self.model.get("global_steps", 0) - self.model.get("skipped_steps", 0) if state else 0
        return int(step)

    def state_names(self):
        names = dict.fromkeys(name for index in self.inner()["state"] for name in self.states(0, index))
        return list(names)

    def optimizer_type(self):
        optimizer = config(self.model).get("optimizer")
        kind = str(optimizer.get("type", "")).lower() if isinstance(optimizer, dict) else ""
        params = optimizer.get("params") if kind else None
        decoupled = params.get("adam_w_mode", True) if isinstance(params, dict) else True
        return "adamw" if kind == "adam" and decoupled else kind

    def groups(self):
        found = []
        for group in self.inner().get("param_groups", []):
            options = {ours: group[theirs] for theirs, ours in _OPTIONS.items() if isinstance(group.get(theirs), bool | int | float)}
            if isinstance(group.get("betas"), tuple | list) and len(group["betas"]) == 2:
                options["beta1"], options["beta2"] = group["betas"]
            found.append(options)
        return found

    def shared(self):
        """Tied names. Stage 0 doesn't list them; there they are the same memory of the file."""
        if self.model.get("shared_params"):
            return {alias: name for alias, name in self.model["shared_params"].items() if alias != name}
        first, aliases = {}, {}
        for name, value in self.module.items():
            if isinstance(value, StoredTensor) and value.numel() and first.setdefault(value.place(), name) != name:
                aliases[name] = first[value.place()]
        return aliases

    def loss_scaler(self):
        """As our manifest has it, or None."""
        states = self.model.get("optimizer") if self.stage == 0 else self.optimizer_files[0].get("loss_scaler")
        states = states.state if isinstance(states, Foreign) else states
        if not isinstance(states, dict) or not config(self.model).get("fp16", {}).get("enabled") or "cur_scale" not in states:
            return None
        hysteresis = states.get("cur_hysteresis", config(self.model)["fp16"].get("hysteresis", 2))
        return {"scale": float(states["cur_scale"]), "iteration": int(states.get("cur_iter", 0)),
                "last_overflow": int(states.get("last_overflow_iter", -1)), "hysteresis_left": int(hysteresis)}

    def compute_dtype(self):
        for key, name in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
            if isinstance(config(self.model).get(key), dict) and config(self.model)[key].get("enabled"):
                return name
        return "fp32"

    def param_shapes(self):
        """[(name, shape, group)] of what is trained. At stage 3 they come by sub-group, which the optimizer's groups number."""
        listed = self.take(self.model, "param_shapes", list)
        groups = self.inner()["param_groups"] if self.stage == 3 else []
        group_of = {i: g for g, group in enumerate(groups) for i in group.get("params", [])}
        return [(name, shape, group_of.get(i, i)) for i, shapes in enumerate(listed) for name, shape in shapes.items()]

    def parameter(self, name, shape, dtype=None, group=-1, steps=0):
        return {"name": name, "shape": list(shape), "strides": list(_contiguous(shape)), "dtype": dtype or self.compute_dtype(),
                "group": group, "steps": steps}

    def module_order(self, parameters):
        """In the order of the module."""
        place = {name: i for i, name in enumerate(self.module)}
        return sorted(parameters, key=lambda parameter: place.get(parameter["name"], len(place)))


def _contiguous(shape):
    from unshard.checkpoint.stored_tensor import contiguous_stride
    return contiguous_stride(tuple(shape))


def whole(tensor):
    return [Piece(0, tensor.numel(), tensor)]


def frozen_of_module(saved, known, pieces):
    """The parameters of the model states that no optimizer has: (whole) frozen ones. Fills `pieces` for all that are there."""
    skip = {*(saved.model.get("buffer_names") or []), *saved.shared()}
    frozen = []
    for name, tensor in saved.module.items():
        if name in skip or not isinstance(tensor, StoredTensor):
            continue
        if ("fp32", name) not in pieces:
            pieces["param", name] = whole(tensor)
        if name not in known:
            frozen.append(saved.parameter(name, tensor.shape, DTYPE_NAMES.get(tensor.dtype, "fp32")))
    return frozen


def stage0(saved):
    """Also gives why the optimizer's states can't be told apart, or None; the weights are named in any case."""
    masters = saved.model["optimizer"].get("fp32_groups", []) if isinstance(saved.model.get("optimizer"), dict) else []
    pieces, parameters, index = {}, [], 0
    names, why = names_of_groups(saved, masters)
    for group, of_group in enumerate(names):
        for i, name in enumerate(of_group):
            tensor = saved.take(saved.module, name, StoredTensor)
            parameters.append(saved.parameter(name, tensor.shape, DTYPE_NAMES.get(tensor.dtype), group, saved.steps(index)))
            if masters:
                pieces["fp32", name] = whole(masters[group][i])
            for state, value in saved.states(0, index).items():
                pieces[state, name] = whole(value)
            index += 1
    parameters += frozen_of_module(saved, {parameter["name"] for parameter in parameters}, pieces)
    return pieces, saved.module_order(parameters), why


def stage12(saved):
    pieces = collections.defaultdict(list)
    reached = collections.Counter()
    for rank, states in enumerate(saved.optimizer_files):
        flats = saved.take(states, "single_partition_of_fp32_groups", list)
        mappings = saved.take(states, "param_slice_mappings", list)
        for group, (flat, mapping) in enumerate(zip(flats, mappings, strict=True)):
            others = saved.states(rank, group)
            for name, address in mapping.items():
                numel, start = _address(saved, address)
                span = reached[name], reached[name] + numel
                reached[name] = span[1]
                pieces["fp32", name].append(Piece(*span, flat, start))
                for state, value in others.items():
                    pieces[state, name].append(Piece(*span, value, start))
    parameters = []
    for name, shape, group in saved.param_shapes():
        dtype = DTYPE_NAMES.get(saved.module[name].dtype) if isinstance(saved.module.get(name), StoredTensor) else None
        parameters.append(saved.parameter(name, shape, dtype, group, saved.steps(group)))
    parameters += frozen_of_module(saved, {parameter["name"] for parameter in parameters}, pieces)
    return pieces, saved.module_order(parameters)


def _address(saved, address):
    state = address.state if isinstance(address, Foreign) else {}
    numel, start = state.get("numel"), state.get("start")
    if not (type(numel) is int and type(start) is int and numel >= 0 and start >= 0):
        saved.fail(f"param_slice_mappings has {address!r} where a place should be")
    return numel, start


def stage3(saved):
    ranks = len(saved.optimizer_files)
    if len(saved.model_files) != ranks:
        saved.fail(f"it has the model states of {len(saved.model_files)} ranks and the optimizer states of {ranks}")
    pieces = collections.defaultdict(list)
    subgroup_of = {}
    for rank, states in enumerate(saved.optimizer_files):
        flats = saved.take(states, "fp32_flat_groups", list)
        if not all(isinstance(flat, StoredTensor) for flat in flats):
            saved.fail(f"the optimizer's states of rank {rank} were offloaded to NVMe, which isn't supported; save from a run without")
        subgroup = start = 0
        for name, shape, _ in saved.param_shapes():
            cut = -(-math.prod(shape) // ranks)
            while subgroup < len(flats) and start == flats[subgroup].numel() and cut:
                subgroup, start = subgroup + 1, 0
            if subgroup == len(flats) or start + cut > flats[subgroup].numel():
                saved.fail(f"rank {rank}'s buffers of {[flat.numel() for flat in flats]} elements don't hold its {cut} of '{name}'")
            subgroup_of[name] = subgroup
            for kind, flat in {"fp32": flats[subgroup], **saved.states(rank, subgroup)}.items():
                _add_cut(pieces[kind, name], rank, cut, math.prod(shape), flat, start)
            start += cut
    parameters = [saved.parameter(name, shape, None, group, saved.steps(subgroup_of[name])) for name, shape, group in saved.param_shapes()]
    parameters += frozen_of_fragments(saved, ranks, pieces)
    return pieces, saved.module_order(parameters)


def _add_cut(found, rank, cut, numel, flat, start):
    """Rank's cut of a parameter, without the padding."""
    begin, end = min(rank * cut, numel), min((rank + 1) * cut, numel)
    if end > begin:
        found.append(Piece(begin, end, flat, start))


def frozen_of_fragments(saved, ranks, pieces):
    parameters = []
    for name, shape in (saved.model.get("frozen_param_shapes") or {}).items():
        numel = math.prod(shape)
        for rank, model in enumerate(saved.model_files):
            fragment = (model.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(fragment, StoredTensor):
                saved.fail(f"rank {rank}'s model states lack their part of the frozen '{name}'")
            _add_cut(pieces["param", name], rank, -(-numel // ranks), numel, fragment, 0)
        dtype = pieces["param", name][0].tensor.dtype if pieces["param", name] else torch.float32
        parameters.append(saved.parameter(name, shape, DTYPE_NAMES.get(dtype, "fp32")))
    return parameters
