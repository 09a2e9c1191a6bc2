"""Hugging Face folders: export (model.safetensors, in shards with an index where larger) and reading, weights only."""
import json
import os
import shutil

from unshard.checkpoint.source import DTYPE_NAMES, DTYPES, Piece, Source, reading
from unshard.checkpoint.stored_tensor import StoredStorage, StoredTensor, contiguous_stride
from unshard.checkpoint.torch_file import read_torch_file, verify_torch_file
from unshard.checkpoint.zero_to_fp32_script import LazyTensor, read_header, write_state_dict
from unshard.core import CheckpointError

_SAFE, _BIN = "model.safetensors", "pytorch_model.bin"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


# What a Trainer and a checkpoint leave in a folder beside the model. `latest` would make a checkpoint of the copy.
_OF_THE_RUN = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py", "trainer_state.json")
_OF_THE_RUN_SUFFIXES = ("_results.json", ".pkl")


def is_hf_folder(folder):
    return any(os.path.isfile(os.path.join(folder, name + index)) for name in (_SAFE, _BIN) for index in ("", ".index.json"))


class HfSource(Source):
    """The weights of a Hugging Face folder. Which of them are buffers it doesn't say: all count as weights, none as trained."""

    def __init__(self, folder):
        self.folder = os.fspath(folder)
        with reading(folder):
            self._open()

    def _open(self):
        shared, tensors = {}, {}
        self._files = _weight_files(self.folder)
        for path in self._files:
            found = _safetensors(path, shared) if path.endswith(".safetensors") else _torch(path, shared)
            twice = set(found) & set(tensors)
            if twice:
                raise CheckpointError(f"[checkpoint] {path} has {min(twice)!r}, and so has another of the folder's files")
            tensors.update(found)
        parameters = [{"name": name, "shape": list(tensor.shape), "strides": list(contiguous_stride(tensor.shape)),
                       "dtype": DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")), "group": -1, "steps": 0}
                      for name, tensor in tensors.items()]
        zero = dict.fromkeys(("micro_steps", "global_steps", "global_samples", "skipped_steps", "applied_updates"), 0)
        contents = {"tag": os.path.basename(os.path.normpath(self.folder)), "world_size": 1, "stage": 0, "unshard_version": "",
                    "torch_version": "", "optimizer": {"type": "", "states": []}, "counters": zero, "groups": [], "parameters": parameters,
                    "shared": {alias: name for alias, name in shared.items() if name in tensors and alias not in tensors}}
        Source.__init__(self, self.folder, "Hugging Face weights", contents,
                         {("param", name): [Piece(0, tensor.numel(), tensor)] for name, tensor in tensors.items()})

    def files(self):
        return list(self._files)

    def verify(self, progress=lambda done, total, what: None):
        """Safetensors files have no checksums: their sizes and headers were checked when the folder was opened."""
        for path in self._files:
            if not path.endswith(".safetensors"):
                verify_torch_file(path)


def _weight_files(folder):
    for name in (_SAFE, _BIN):
        index = os.path.join(folder, name + ".index.json")
        if os.path.isfile(index):
            try:
                with open(index, encoding="utf-8") as file:
                    names = sorted(set(json.load(file)["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(f"[checkpoint] {index} is damaged ({type(error).__name__}: {error})") from error
            if any(os.path.basename(name) != name for name in names):
                raise CheckpointError(f"[checkpoint] {index} names a file outside of its folder")
            return [os.path.join(folder, name) for name in names]
        if os.path.isfile(os.path.join(folder, name)):
            return [os.path.join(folder, name)]
    raise CheckpointError(f"[checkpoint] {folder} holds neither {_SAFE} nor {_BIN}, nor their index")


def _safetensors(path, shared):
    metadata = {}
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    header = read_header(path, size, metadata)
    shared.update({alias: name for alias, name in metadata.items() if alias != "format" and name in header})
    return {name: StoredTensor(StoredStorage(path, offset, StoredTensor.bytes_of(dtype, shape), dtype), dtype, 0, shape)
            for name, (dtype, shape, offset) in header.items()}


def _torch(path, shared):
    value = read_torch_file(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"[checkpoint] {path} holds a {type(value).__name__}, not a state dict")
    first, kept = {}, {}
    for name, tensor in value.items():
        if not isinstance(tensor, StoredTensor):
            raise CheckpointError(f"[checkpoint] {path}: {name!r} isn't a tensor")
        if tensor.numel() and first.setdefault(tensor.place(), name) != name:
            shared[name] = first[tensor.place()]
        else:
            kept[name] = tensor
    return kept


def export_hf(source, output_dir, dtype=None, max_shard_size="5GB", config_from=None, progress=None):
    """Write the weights as Hugging Face has them; returns the names of the files. `dtype` ("bf16", ...): of all floating-point weights;
    None: what each was trained in. Tied names are listed in the metadata and not written twice: from_pretrained ties them again.
    `config_from`: a folder whose config and tokenizer files are copied. Memory: the largest tensor."""
    wanted = None if dtype is None else DTYPES.get(dtype)
    if dtype is not None and wanted is None:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if config_from is not None and not os.path.isfile(os.path.join(config_from, "config.json")):
        raise ValueError(f"{config_from} holds no config.json")
    state = {}
    for name, value in source.buffers().items():
        state[name] = LazyTensor(value.shape, value.contiguous, value.dtype)
    for name in source.names():
        target = wanted if wanted is not None and source.compute_dtype(name).is_floating_point else source.compute_dtype(name)
        state[name] = LazyTensor(source.shape(name), lambda name=name, target=target: source.weight(name).to(target), target)
    files = write_state_dict(state, os.fspath(output_dir), max_shard_size, True, metadata=dict(source.shared), progress=progress)
    if config_from is not None:
        files += _copy_config(config_from, output_dir)
    return files


def _copy_config(folder, output_dir):
    """All of the folder's files that aren't weights or of a training run: models with code or tokenizers of their own have any names."""
    left_out, copied = (*_WEIGHT_SUFFIXES, ".index.json", *_OF_THE_RUN_SUFFIXES), []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_file() and not entry.name.endswith(left_out) and entry.name not in _OF_THE_RUN and not entry.name.startswith("."):
            shutil.copyfile(entry.path, os.path.join(output_dir, entry.name))
            copied.append(entry.name)
    return copied
