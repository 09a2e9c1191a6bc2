"""save_checkpoint and load_checkpoint of the engine."""
import contextlib
import json
import math
import os
import shutil
import stat

import torch

from unshard import python_state
from unshard.checkpoint.encoding import decode
from unshard.core import CheckpointError, _core

_STATE_TEXT, _STATE_TENSORS, _MANIFEST = "state.json", "state.safetensors", "manifest.json"
_SCRIPTS = ("zero_to_fp32", "zero_to_torch")


class EngineCheckpoint:
    """Mixed into Engine."""

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """The whole training state to the folder `save_dir/tag`; all ranks call. Returns True.

        The folder is complete or absent, whoever is killed when; `save_dir/latest` names it, written last. With
        `unshard.checkpoint.async` the call returns when the values are copied; the next save, load or destroy() waits for the files and
        raises what went wrong with them.

        Parameters
        ----------
        tag : str, optional
            Default: global_step{N}; epoch1/step20 is a folder in a folder. Ranks that give different ones are told
            (`checkpoint.tag_validation`); rank 0's counts.
        client_state : dict
            Rank 0's is kept: numbers, text, tensors, arrays, containers of them (see unshard.checkpoint.encoding).
        exclude_frozen_parameters : bool
            Leave out parameters that require no gradient.

        Raises
        ------
        CheckpointError
            On all ranks: a client_state that can't be kept, a disk that is full; the former checkpoint is as it was.
        """
        save_dir = os.fspath(save_dir)
        self._store.check_all_in(f"save({save_dir})")
        tag = self._agreed_tag(f"global_step{self.global_steps}" if tag is None else str(tag))
        self._apply_waiting_values()
        rng = self._comm().all_gather_strings(python_state.rng_state())
        text, tensors = self._on_all("save_checkpoint", lambda: self._encoded(save_dir, client_state, rng))
        self._core.save(os.path.join(save_dir, tag), text, tensors, exclude_frozen=exclude_frozen_parameters, write_latest=save_latest,
                        shared=self._shared_names(), latest_in=save_dir)
        return True

    def finish_save(self):
        """Wait until a save in the background is on the disk; all ranks call. Raises CheckpointError when it failed."""
        self._core.finish_save()

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
                        load_module_only=False, custom_load_fn=None):
        """Back to a saved state, whatever world size, stage or dtype it was saved with, by unshard or by DeepSpeed; all ranks call.

        Parameters
        ----------
        tag : str, optional
            Default: what `load_dir/latest` names.
        load_module_strict : bool
            Names that only the model or only the checkpoint has are an error; else what is there is loaded.
        load_module_only : bool
            Weights and buffers, nothing else.
        custom_load_fn : callable(src=state_dict, dst=module), optional
            Puts the weights in place instead of the engine.

        Returns
        -------
        (path, client_state), or (None, None) with a warning when `load_dir` names no checkpoint.

        Raises
        ------
        CheckpointError
            On all ranks, naming file and reason: a tag that isn't there, damaged files, another model. Nothing was changed.
        """
        load_dir = os.fspath(load_dir)
        self._store.check_all_in(f"load({load_dir})")
        tag = self._on_all("load_checkpoint", lambda: self._tag_to_load(load_dir, tag))
        if tag is None:
            if self.global_rank == 0:
                _core.log_warning(0, f"load_checkpoint: {os.path.join(load_dir, 'latest')} isn't there; nothing was loaded")
            return None, None
        folder = _core.present_checkpoint(os.path.join(load_dir, tag))
        native = os.path.isfile(os.path.join(folder, _MANIFEST))
        open_it = self._open_native if native else self._open_foreign
        source, state, path = self._on_all("load_checkpoint", lambda: open_it(load_dir, folder, custom_load_fn))
        options = {"load_optimizer": load_optimizer_states, "weights_only": load_module_only, "strict": load_module_strict}
        if custom_load_fn is not None:
            if native:                                   # checksums first, as for a load without it
                rest = not load_module_only
                self._on_all("load_checkpoint", lambda: source.verify(self.global_rank, self.world_size, rest and load_optimizer_states))
            self._load_by(custom_load_fn, source, state)
            options.update(weights=False, strict=False)
        self._waiting_values.clear()
        micro_steps = self.micro_steps
        if custom_load_fn is None or not load_module_only:
            report = self._core.load(folder, **options) if native else self._core.load_source(source, **options)
            self._say_what_differs(report, options["strict"])
        if self._answers_as_deepspeed:
            self._micro_steps_loaded = self._core.micro_steps - micro_steps
        python_state.apply_state(self, state, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        self.loaded_checkpoint_tag = tag
        return path, state.get("client_state", {})

    # ---- saving ---------------------------------------------------------------------------------------------------------------------
    def _comm(self):
        return self._store.comm

    def _on_all(self, where, work):
        """work() on every rank; an error on one is a CheckpointError on all."""
        result, error = None, ""
        try:
            result = work()
        except Exception as caught:                      # whatever it is, the other ranks must hear of it
            error, cause = str(caught) or type(caught).__name__, caught
        errors = self._comm().all_gather_strings(error[:100_000])
        if error:
            raise CheckpointError(error) from cause
        for rank, other in enumerate(errors):
            if other:
                raise CheckpointError(f"[{where}] rank {rank} failed: {other}")
        return result

    def _agreed_tag(self, tag):
        tags = self._comm().all_gather_strings(tag)
        validation = self._config.checkpoint.tag_validation.lower()
        if len(set(tags)) > 1 and validation != "ignore":
            other = next(rank for rank, theirs in enumerate(tags) if theirs != tags[0])
            text = f"[save_checkpoint] rank 0 saves under tag '{tags[0]}', rank {other} under '{tags[other]}'"
            if validation == "fail":
                raise CheckpointError(f"{text}; give all ranks the same tag")
            if self.global_rank == 0:
                _core.log_warning(0, f"{text}; '{tags[0]}' is used")
        parts = [part for part in tags[0].split("/") if part not in ("", ".")]       # epoch1/step20 is a folder in a folder
        if (not parts or tags[0].startswith("/") or parts[0] == "latest" or ".." in parts
                or any(part.endswith((".partial", ".former", ".deleted")) for part in parts)):
            raise ValueError(f"[save_checkpoint] tag '{tags[0]}' can't be the name of a folder of its own")
        return "/".join(parts)

    def _encoded(self, save_dir, client_state, rng):
        if self.global_rank != 0:
            return "{}", {}
        encoded = python_state.encode_state(self, {} if client_state is None else client_state, rng)
        os.makedirs(save_dir, exist_ok=True)
        if self._config.zero.stage > 0:
            _put_scripts(save_dir)
        return encoded

    def _shared_names(self):
        """{other name of a tied parameter: the one that the engine knows}."""
        first, shared = {}, {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            kept = first.setdefault(id(parameter), name)
            if kept != name:
                shared[name] = kept
        return shared

    # ---- loading --------------------------------------------------------------------------------------------------------------------
    def _tag_to_load(self, load_dir, tag):
        if tag is not None:
            return str(tag)
        universal = os.path.join(load_dir, "latest_universal")
        found = "" if self._config.checkpoint.load_universal and os.path.isfile(universal) else _core.latest_tag(load_dir)
        if not found and os.path.isfile(universal):
            with open(universal, encoding="utf-8", errors="replace") as file:
                found = file.read().strip()
        return found or None

    def _open_native(self, load_dir, folder, custom_load_fn):
        source = _core.open_checkpoint(folder)           # checks the manifest
        state, path = {}, os.path.join(folder, _STATE_TEXT)
        if os.path.isfile(path):
            tensors = _core.read_tensor_file(os.path.join(folder, _STATE_TENSORS))
            try:
                with open(path, encoding="utf-8") as file:
                    state = decode(file.read(), tensors)
                if not isinstance(state, dict):
                    raise CheckpointError("it holds no object")
            except (CheckpointError, UnicodeDecodeError) as error:
                raise CheckpointError(f"[load_checkpoint] {path} is damaged: {error}") from error
        python_state.check_state(self, state, folder)
        return source, state, os.path.join(folder, _MANIFEST)

    def _open_foreign(self, load_dir, folder, custom_load_fn):
        if not os.path.isdir(folder):
            there = sorted(e.name for e in os.scandir(load_dir) if e.is_dir()) if os.path.isdir(load_dir) else []
            raise CheckpointError(f"[load_checkpoint] {folder} isn't there; tags there: {', '.join(there) or 'none'}")
        from unshard.checkpoint.opening import open_folder
        groups = None
        if self.optimizer is not None:
            groups = [[self._names[p] for p in group["params"] if p in self._names] for group in self.optimizer.param_groups]
        source = open_folder(folder, groups)
        state = source.python_state()
        for place, kind in state.get("left_out", {}).items():
            if self.global_rank == 0:
                _core.log_warning(0, f"load_checkpoint: client_state{place} of {folder} is a {kind}, which isn't loaded")
        python_state.check_state(self, state, folder)
        return source, state, os.path.join(folder, "mp_rank_00_model_states.pt")

    def _load_by(self, custom_load_fn, source, state):
        """The caller's function puts whole weights into the module."""
        contents = json.loads(source.contents()) if callable(source.contents) else source.contents
        weights = dict(state.get("buffers", {}))
        for parameter in contents["parameters"]:
            name, kinds = parameter["name"], parameter["kinds"]
            if kinds:
                value = source.read("fp32" if "fp32" in kinds else "param", name, 0, math.prod(parameter["shape"]))
                weights[name] = value.reshape(parameter["shape"])
        for alias, name in contents.get("shared", {}).items():
            if name in weights:
                weights[alias] = weights[name]
        with torch.no_grad():
            custom_load_fn(src=weights, dst=self.module)
        self._store.settle()

    def _say_what_differs(self, report, strict):
        if strict or self.global_rank != 0:
            return
        for what, names in (("the checkpoint has no", report["missing"]), ("the model has no", report["unexpected"])):
            if names:
                _core.log_warning(0, f"load_checkpoint: {what} {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")


def _put_scripts(save_dir):
    """zero_to_fp32.py and zero_to_torch.py beside the checkpoints: whole weights of them without unshard."""
    for name in _SCRIPTS:
        source = os.path.join(os.path.dirname(__file__), "checkpoint", f"{name}_script.py")
        target = os.path.join(save_dir, f"{name}.py")
        if os.path.isfile(source):
            shutil.copyfile(source, target + ".tmp")
            with contextlib.suppress(PermissionError):       # a share without modes
                os.chmod(target + ".tmp", os.stat(target + ".tmp").st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            os.replace(target + ".tmp", target)
