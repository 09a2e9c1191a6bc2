"""What Python keeps of a training beside the engine's own state: gathered for a checkpoint, and put back."""
import base64
import json
import random
import sys

import torch

from unshard.checkpoint.encoding import encode
from unshard.core import CheckpointError
from unshard.schedules import Schedule
from unshard.tensors import bytes_of


def encode_state(engine, client_state, rng):
    """(JSON text, {name: tensor}) of rank 0's state. `rng`: every rank's, as rng_state() gives it."""
    optimizer, schedule = engine.optimizer, engine.lr_scheduler
    groups = [] if optimizer is None else [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    parts = {"buffers": dict(engine.module.named_buffers(remove_duplicate=False)),
             "persistent_buffers": _persistent_buffers(engine.module), "optimizer": {"param_groups": groups},
             "lr_scheduler": schedule.state_dict() if hasattr(schedule, "state_dict") else None, "client_state": client_state, "rng": rng}
    if engine._client_face is not None:
        parts["optimizer"]["extra_state"] = engine._client_face.extra_state(engine._ids)
    encode(client_state, "client_state")               # an error in it goes by the name that the user knows
    return encode(parts, "state")


def _persistent_buffers(module):
    """The names of those that belong to a state dict."""
    return [f"{prefix}.{name}" if prefix else name for prefix, part in module.named_modules(remove_duplicate=False)
            for name, value in part._buffers.items() if value is not None and name not in part._non_persistent_buffers_set]


def apply_state(engine, state, load_optimizer, load_schedule, weights_only):
    """Put a decoded state back; called when the engine's own has been loaded. Foreign checkpoints may lack parts."""
    own = dict(engine.module.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, value in state.get("buffers", {}).items():
            if name in own:
                own[name].copy_(value)
    if weights_only:
        return
    optimizer = state.get("optimizer") or {}
    if load_optimizer and engine.optimizer is not None:
        engine.optimizer.load_groups(optimizer.get("param_groups", ()))
        if engine._client_face is not None:
            engine._client_face.load_extra_state(optimizer.get("extra_state") or {}, engine._ids)
    if load_schedule and engine.lr_scheduler is not None and state.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if load_optimizer and not optimizer.get("param_groups") and isinstance(engine.lr_scheduler, Schedule):
            engine.lr_scheduler.apply()                      # the rate that no group brought
    rng = state.get("rng") or ()
    if engine.global_rank < len(rng):
        set_rng_state(rng[engine.global_rank])


def check_state(engine, state, origin):
    """What can be known to be wrong before anything is changed."""
    own = dict(engine.module.named_buffers(remove_duplicate=False))
    for name, value in state.get("buffers", {}).items():
        if name in own and own[name].shape != value.shape:
            raise CheckpointError(f"[load_checkpoint] {origin}: buffer '{name}' has shape {list(value.shape)}, the model's is "
                                  f"{list(own[name].shape)}")


def rng_state():
    """This rank's random generators, as text: torch's on the CPU and the device in use, Python's, and NumPy's where it is in use."""
    version, words, gauss = random.getstate()
    state = {"torch": _text(torch.get_rng_state()), "python": [version, _words(words), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, _words(keys.tolist()), position, has_gauss, cached]
    return json.dumps(state)


def set_rng_state(text):
    state = json.loads(text)
    torch.set_rng_state(_bytes(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(_ints(words)), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))
    if "numpy" in state:
        try:
            import numpy
        except ImportError:                      # nothing here draws from it
            return
        name, words, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(_ints(words), dtype=numpy.uint32), *rest))


def _text(tensor):
    return base64.b64encode(bytes_of(tensor)).decode()


def _bytes(text):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _words(values):
    return base64.b64encode(b"".join(value.to_bytes(4, "little") for value in values)).decode()


def _ints(text):
    data = base64.b64decode(text)
    return [int.from_bytes(data[i:i + 4], "little") for i in range(0, len(data), 4)]
