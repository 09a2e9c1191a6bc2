"""Saving and loading through the engine: state dicts, whole weights, checkpoints."""
import os

import torch

from unshard.core import CheckpointError, _core
from unshard.zero import whole

_PYTHON_STATE = "python_state.pt"      # beside the engine's own files: buffers, schedule, groups, the user's client_state


class EngineState:
    """Mixed into Engine: everything that reads or writes the training state."""

    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """The module's state dict (names without a prefix)."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False):
        """Load weights into the module, partitioned or not; a dict with the key "module" is opened first."""
        state = checkpoint["module"] if "module" in checkpoint and isinstance(checkpoint["module"], dict) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)
        self._store.settle()

    def _set_local_fp32(self, id, value):
        self._core.set_local_fp32_param(id, value)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """Whole weights in the model's own dtype: CPU tensors on rank 0, None elsewhere. Collective; one parameter at a time."""
        wanted, copies = {}, {}
        for name, tensor in self.module_state_dict(keep_vars=True, exclude_frozen_parameters=exclude_frozen_parameters).items():
            if self.global_rank == 0 and isinstance(tensor, torch.Tensor):
                if id(tensor) not in copies:
                    with torch.no_grad(), whole([tensor]):
                        copies[id(tensor)] = tensor.detach().cpu().clone()
                tensor = copies[id(tensor)]
            wanted[name] = tensor
        self._store.check_all_in("consolidated state dict")
        return wanted if self.global_rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Whole weights in the model's own dtype to one file; collective. False at stage 3 without
        stage3_gather_16bit_weights_on_model_save."""
        if self._config.zero.stage == 3 and not self._config.zero.gather_16bit_weights_on_model_save:
            if self.global_rank == 0:
                _core.log_warning(0, "save_16bit_model: nothing saved: stage3_gather_16bit_weights_on_model_save is false")
            return False
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))
        self._store.check_all_in("save_16bit_model")
        return True

    save_fp16_model = save_16bit_model

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """The whole training state to `save_dir/tag` (default global_step{N}); all ranks call. Returns True."""
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        folder = os.path.join(save_dir, tag)
        os.makedirs(folder, exist_ok=True)
        self._apply_waiting_values()
        self._core.save(folder)
        if self.global_rank == 0:
            torch.save(self._python_state(client_state or {}), os.path.join(folder, _PYTHON_STATE))
        self._store.check_all_in(f"save_checkpoint(tag={tag})")
        if save_latest and self.global_rank == 0:
            written = os.path.join(save_dir, ".latest")
            with open(written, "w") as file:
                file.write(tag)
            os.replace(written, os.path.join(save_dir, "latest"))
        self._store.check_all_in(f"save_checkpoint(tag={tag}), latest")
        return True

    def _python_state(self, client_state):
        groups = [] if self.optimizer is None else [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        schedule = self.lr_scheduler.state_dict() if hasattr(self.lr_scheduler, "state_dict") else None
        names = [] if self.optimizer is None else self.optimizer._core_optimizer.state_names()
        return {"state_names": names, "buffers": dict(self.module.named_buffers()), "groups": groups, "lr_scheduler": schedule,
                "client_state": client_state}

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
                        load_module_only=False, custom_load_fn=None):
        """Back to a saved state; all ranks call. Returns (path of the tag's file, client_state), or (None, None) when `load_dir` names no
        tag. Raises CheckpointError for a tag that isn't there or a file that can't be used."""
        if tag is None:
            latest = os.path.join(load_dir, "latest")
            if not os.path.isfile(latest):
                _core.log_warning(self.global_rank, f"load_checkpoint: {latest} isn't there; nothing was loaded")
                return None, None
            with open(latest) as file:
                tag = file.read().strip()
        folder = os.path.join(load_dir, str(tag))
        path = os.path.join(folder, _PYTHON_STATE)
        if not os.path.isfile(path):
            raise CheckpointError(f"[load_checkpoint] {folder} holds no checkpoint; tags there: "
                                  f"{sorted(e.name for e in os.scandir(load_dir) if e.is_dir()) if os.path.isdir(load_dir) else 'none'}")
        state = _read_python_state(path)
        self._waiting_values.clear()
        if self._client_face is not None:
            self._client_face.expect(state["state_names"])
        self._core.load(folder, load_optimizer_states and not load_module_only)
        own = dict(self.module.named_buffers())
        for name, value in state["buffers"].items():
            if name in own:
                own[name].copy_(value)
        if not load_module_only:
            if load_optimizer_states and self.optimizer is not None:
                self.optimizer.load_groups(state["groups"])
            if load_lr_scheduler_states and self.lr_scheduler is not None and state["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.loaded_checkpoint_tag = str(tag)
        return path, state["client_state"]


def _read_python_state(path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"[load_checkpoint] {path}: {str(error).splitlines()[0]} (client_state may hold numbers, text, lists, dicts "
                              "and tensors; admit other classes with torch.serialization.add_safe_globals)") from error
