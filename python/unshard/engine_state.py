"""State dicts and whole weights of the engine's module. Checkpoints are in engine_checkpoint."""
import os

import torch

from unshard.core import _core
from unshard.zero import whole


class EngineState:
    """Mixed into Engine."""

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
        """Whole weights in the model's own dtype to one file, one at a time, by rank 0; all ranks call. A name that ends in .safetensors
        gives such a file, any other one that torch.load reads. False at stage 3 without stage3_gather_16bit_weights_on_model_save."""
        if self._config.zero.stage == 3 and not self._config.zero.gather_16bit_weights_on_model_save:
            if self.global_rank == 0:
                _core.log_warning(0, "save_16bit_model: nothing saved: stage3_gather_16bit_weights_on_model_save is false")
            return False
        self._store.check_all_in(f"save_16bit_model({save_dir})")
        self._on_all("save_16bit_model",
                     lambda: self._write_weights(os.path.join(save_dir, save_filename), exclude_frozen_parameters))
        return True

    def _write_weights(self, path, exclude_frozen_parameters):
        if self.global_rank != 0:
            return
        from unshard.checkpoint.zero_to_fp32_script import LazyTensor, write_safetensors, write_torch_file

        def read(tensor):
            with torch.no_grad(), whole([tensor]):
                return tensor.detach().cpu().clone()
        state, first, shared = {}, {}, {}
        for name, tensor in self.module_state_dict(keep_vars=True, exclude_frozen_parameters=exclude_frozen_parameters).items():
            if not isinstance(tensor, torch.Tensor):
                state[name] = tensor
            elif id(tensor) in first:
                shared[name] = first[id(tensor)]
                state[name] = LazyTensor(tensor.shape, None, tensor.dtype, same_as=state[shared[name]])
            else:
                first[id(tensor)] = name
                state[name] = LazyTensor(tensor.shape, lambda tensor=tensor: read(tensor), tensor.dtype)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if path.endswith(".safetensors"):
            write_safetensors(path, {k: v for k, v in state.items() if isinstance(v, LazyTensor) and k not in shared}, shared)
        else:
            write_torch_file(path, state)

    save_fp16_model = save_16bit_model
