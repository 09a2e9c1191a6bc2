"""DeepSpeed's universal layout, written by its converter or by `universal`: a folder for each parameter, a file for each of its values."""
import collections
import os

from unshard.checkpoint import deepspeed_layouts as layouts
from unshard.checkpoint.deepspeed_reader import DeepSpeedSource, contents_of, read_states
from unshard.checkpoint.source import DTYPE_NAMES, Source, reading
from unshard.checkpoint.stored_tensor import StoredTensor
from unshard.checkpoint.torch_file import loaded, read_torch_file
from unshard.core import CheckpointError


def is_universal_folder(folder):
    return os.path.isfile(os.path.join(folder, "zero", "optimizer_state.pt"))


class UniversalSource(DeepSpeedSource):
    """A tag's folder in the universal layout. Frozen weights and buffers are those of the model states beside it."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.without_optimizer = None
        with reading(folder):
            self._open()

    def _open(self):
        optimizer = read_states(os.path.join(self.folder, "zero", "optimizer_state.pt"))
        whole_module = os.path.join(self.folder, "mp_rank_00_model_states.pt")
        model_files = [whole_module] if os.path.isfile(whole_module) else self._files_by_rank()[0]
        models = [read_states(path) for path in model_files]
        self._model = models[0]
        saved = _Saved(self.folder, optimizer, models)
        pieces, parameters = collections.defaultdict(list), []
        for name, shape, group in saved.param_shapes():
            values, steps = saved.values_of(name, shape)
            pieces.update({(kind, name): layouts.whole(value) for kind, value in values.items()})
            own = saved.module.get(name)
            dtype = DTYPE_NAMES.get(own.dtype) if isinstance(own, StoredTensor) and own.numel() else None
            parameters.append(saved.parameter(name, shape, dtype, group, steps))
        known = {parameter["name"] for parameter in parameters}
        if os.path.isfile(whole_module):
            parameters += layouts.frozen_of_module(saved, known, pieces)
        else:
            parameters += layouts.frozen_of_fragments(saved, len(models), pieces)
        Source.__init__(self, self.folder, f"DeepSpeed {self._model.get('ds_version', '?')}, universal layout",
                        contents_of(saved, saved.module_order(parameters)), pieces)

    def files(self):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(self.folder) for name in names]
        return sorted(path for path in found if path.endswith(".pt"))


class _Saved(layouts.Saved):
    def __init__(self, folder, optimizer, models):
        stage = optimizer.get("zero_stage", 1)
        if stage not in (1, 2, 3):
            raise CheckpointError(f"[checkpoint] {folder}: ZeRO stage {stage!r} isn't one that is known")
        super().__init__(folder, stage, models[0], models, [optimizer], None)
        self._names = {}

    def values_of(self, name, shape):
        """{kind: StoredTensor} and the step count of a parameter's folder."""
        folder = os.path.join(self.folder, "zero", name)
        if not os.path.isdir(folder):
            self.fail(f"it has no folder zero/{name}")
        values, steps = {}, None
        for file in sorted(os.listdir(folder)):
            kind, suffix = os.path.splitext(file)
            if suffix != ".pt":
                continue
            value = read_torch_file(os.path.join(folder, file))
            if kind == "step":
                steps = int(loaded(value))
                continue
            value = value.get("param") if isinstance(value, dict) else value
            if not isinstance(value, StoredTensor) or value.numel() != shape.numel():
                self.fail(f"zero/{name}/{file} holds no value of shape {list(shape)}")
            values[kind] = value
            self._names[kind] = None
        if "fp32" not in values:
            self.fail(f"it has no zero/{name}/fp32.pt")
        return values, self._common_steps() if steps is None else steps

    def _common_steps(self):
        """Of a stage 3 folder, which has them in the optimizer's state only."""
        states = self.optimizer_files[0].get("optimizer_state_dict")
        states = states.get("state", {}) if isinstance(states, dict) else {}
        steps = [int(loaded(state["step"])) for state in states.values() if isinstance(state, dict) and "step" in state]
        return max(steps, default=int(self.model.get("global_steps") or 0) - int(self.model.get("skipped_steps") or 0))

    def inner(self, rank=0):
        return {"state": {}, "param_groups": self.take(self.optimizer_files[0], "param_groups", list)}

    def state_names(self):
        return sorted(set(self._names) - {"fp32"})
