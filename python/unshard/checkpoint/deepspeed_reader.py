"""Checkpoints that DeepSpeed wrote (stages 0 to 3, any world size), as a Source: weights, masters, moments and counters where they lie in
DeepSpeed's files, found by their names; nothing is read before it is asked for."""
import os
import re

from unshard.checkpoint import deepspeed_layouts as layouts
from unshard.checkpoint.source import Source, reading
from unshard.checkpoint.torch_file import foreign_places, loaded, read_torch_file, verify_torch_file
from unshard.core import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# What DeepSpeed itself puts beside the user's client_state.
OWN_KEYS = frozenset("""module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size mp_world_size
    checkpoint_parallel_dimensions ds_config ds_version num_experts ds_autotp_layers ds_autoep_layers universal_checkpoint_info""".split())


def is_deepspeed_folder(folder):
    return os.path.isdir(folder) and any(_MODEL.fullmatch(name) for name in os.listdir(folder))


class DeepSpeedSource(Source):
    """A tag's folder of DeepSpeed's. `groups` ([[parameter names], ...]) are the optimizer's, which stage 0 doesn't name."""

    def __init__(self, folder, groups=None):
        self.folder = str(folder)
        with reading(folder):
            self._open(groups)

    def _open(self, groups):
        model_files, optimizer_files = self._files_by_rank()
        first = read_states(model_files[0])
        self._model = first
        stage = self._stage(first, optimizer_files)
        self.without_optimizer = None
        saved = layouts.Saved(self.folder, stage, first, None, None, groups)
        if stage == 0:                   # without_optimizer: why the optimizer's states can't be had
            pieces, parameters, self.without_optimizer = layouts.stage0(saved)
        else:
            saved.optimizer_files = [saved.take(read_states(path), "optimizer_state_dict", dict) for path in optimizer_files]
            if stage == 3:
                saved.model_files = [first, *(read_states(path) for path in model_files[1:])]
            pieces, parameters = (layouts.stage3 if stage == 3 else layouts.stage12)(saved)
        contents = contents_of(saved, parameters, self.without_optimizer)
        Source.__init__(self, self.folder, f"DeepSpeed {first.get('ds_version', '?')}, ZeRO stage {stage}", contents, pieces)

    def _files_by_rank(self):
        """The files of model states and of optimizer states, in order of rank, after a check that they are all there."""
        found = {"model": {}, "optimizer": {}}
        for name in os.listdir(self.folder):
            for what, pattern in (("model", _MODEL), ("optimizer", _OPTIMIZER)):
                match = pattern.fullmatch(name)
                if match and int(match[2] or 0) != 0:
                    raise CheckpointError(f"[checkpoint] {self.folder} is of a run with tensor parallelism ({name}), which isn't supported")
                if match and int(match[1] or 0) in found[what]:
                    raise CheckpointError(f"[checkpoint] {self.folder} has two sets of {what} states ({name} and "
                                          f"{found[what][int(match[1] or 0)]}), of two runs: remove the files of the older one")
                if match:
                    found[what][int(match[1] or 0)] = name
            if re.match(r"layer_\d+.*-?model_states\.pt|expp_rank", name):
                raise CheckpointError(f"[checkpoint] {self.folder} is of a pipeline or a mixture of experts ({name}): not supported yet")
        for what, files in found.items():
            if sorted(files) != list(range(len(files))):
                missing = min(set(range(max(files) + 1)) - set(files))
                raise CheckpointError(f"[checkpoint] {self.folder} has no {what} states of rank {missing}, but of rank {max(files)}: "
                                      "copy the files of all ranks into one folder")
        if not found["model"]:
            raise CheckpointError(f"[checkpoint] {self.folder} holds no *_model_states.pt: not a checkpoint of DeepSpeed's")
        return tuple([os.path.join(self.folder, files[rank]) for rank in sorted(files)] for files in found.values())

    def _stage(self, first, optimizer_files):
        if not optimizer_files:
            zero = layouts.config(first).get("zero_optimization")
            if isinstance(zero, dict) and zero.get("stage", 0) and first.get("optimizer") is None:
                raise CheckpointError(f"[checkpoint] {self.folder} has no *_optim_states.pt, which hold the fp32 weights of a ZeRO run: "
                                      "copy them into the folder")
            return 0
        inner = read_states(optimizer_files[0]).get("optimizer_state_dict")
        stage = inner.get("zero_stage", 1) if isinstance(inner, dict) else None         # bf16 with fp32 gradients doesn't say: it is 1
        ranks = int(first.get("dp_world_size", len(optimizer_files)))
        if stage not in (1, 2, 3):
            raise CheckpointError(f"[checkpoint] {optimizer_files[0]}: ZeRO stage {stage!r} isn't one that is known")
        if len(optimizer_files) != ranks:
            raise CheckpointError(f"[checkpoint] {self.folder} was written by {ranks} ranks but holds the optimizer states of "
                                  f"{len(optimizer_files)}: copy the files of all ranks into one folder")
        return stage

    def python_state(self):
        """As Source.python_state. Entries of client_state that hold objects of classes unknown here are left out; their places and classes
        are under "left_out"."""
        with reading(self.folder):
            return self._python_state()

    def _python_state(self):
        client = {key: value for key, value in self._model.items() if key not in OWN_KEYS}
        foreign = foreign_places(client)
        left_out = {place: str(found.name) for place, found in foreign}
        client = {key: value for key, value in client.items() if not foreign_places({key: value})}
        buffers = {name: self._model["module"][name] for name in self._model.get("buffer_names") or [] if name in self._model["module"]}
        schedule = self._model.get("lr_scheduler")
        if foreign_places(schedule):
            left_out["['lr_scheduler']"], schedule = str(foreign_places(schedule)[0][1].name), None
        made = {}
        return {"buffers": loaded(buffers, made), "client_state": loaded(client, made), "lr_scheduler": loaded(schedule, made),
                "left_out": left_out}

    def files(self):
        return sorted(os.path.join(self.folder, name) for name in os.listdir(self.folder)
                      if _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))

    def verify(self, progress=lambda done, total, what: None):
        files = self.files()
        total, done = sum(os.path.getsize(path) for path in files), 0
        for path in files:
            progress(done, total, os.path.basename(path))
            verify_torch_file(path)
            done += os.path.getsize(path)
        progress(total, total, "")


def open(folder, groups=None):  # noqa: A001  (`deepspeed_reader.open`)
    """The Source of a folder of DeepSpeed's, universal or not; `groups` as in DeepSpeedSource."""
    from unshard.checkpoint.universal_reader import UniversalSource, is_universal_folder
    return UniversalSource(folder) if is_universal_folder(folder) else DeepSpeedSource(folder, groups)


def read_states(path):
    value = read_torch_file(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"[checkpoint] {path} holds a {type(value).__name__}, not DeepSpeed's states")
    return value


def contents_of(saved, parameters, without_optimizer=None):
    config = layouts.config(saved.model)
    accumulation = _accumulation_steps(config, int(saved.model.get("dp_world_size") or 1))
    steps, samples, skipped = (int(saved.model.get(key) or 0) for key in ("global_steps", "global_samples", "skipped_steps"))
    contents = {
        "tag": os.path.basename(os.path.normpath(saved.folder)), "world_size": int(saved.model.get("dp_world_size") or 1),
        "stage": saved.stage, "unshard_version": "", "torch_version": "",
        "optimizer": {"type": saved.optimizer_type(), "states": [] if without_optimizer else saved.state_names()},
        "counters": {"micro_steps": steps * accumulation, "global_steps": steps, "global_samples": samples, "skipped_steps": skipped,
                     "applied_updates": steps - skipped, "accumulation_steps": accumulation},
        "groups": [] if without_optimizer else saved.groups(), "parameters": parameters, "shared": saved.shared(),
    }
    if saved.loss_scaler():
        contents["loss_scaler"] = saved.loss_scaler()
    return contents


def _accumulation_steps(config, world):
    steps, batch, micro = (config.get(key) for key in ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"))
    if isinstance(steps, int) and steps > 0:
        return steps
    if isinstance(batch, int) and isinstance(micro, int) and micro > 0:
        return max(1, batch // (micro * world))
    return 1
