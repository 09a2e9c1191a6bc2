"""A small writer of the native format, from whole tensors: what the engine writes, without one. For tests of what reads it."""
import json
import os
import random

import torch
from safetensors.torch import save_file
from unshard.checkpoint.encoding import encode
from unshard.core import _core


def write_native(save_dir, weights, states=(), frozen=(), excluded=(), shared=(), python_state=None, tag="global_step4", ranks=2,
                 dtype="fp32", seed=0, latest=True, **more):
    """`weights` {name: fp32 tensor}, `states` {kind: {name: tensor}}. Every value is cut over the ranks at random places. With a 16-bit
    dtype the trained weights are masters ("fp32"). Returns the tag's folder."""
    draw = random.Random(seed)
    folder = os.path.join(save_dir, tag)
    os.makedirs(folder)
    states = dict(states)
    tensors = [{} for _ in range(ranks)]
    listed = [{} for _ in range(ranks)]
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    def add(kind, name, value):
        flat = value.reshape(-1)
        cuts = [0, *sorted(draw.randrange(len(flat) + 1) for _ in range(ranks - 1)), len(flat)]
        for rank, (begin, end) in enumerate(zip(cuts, cuts[1:])):
            if begin < end or len(flat) == 0 and rank == 0:
                key = f"{kind}.{name}"
                tensors[rank][key] = flat[begin:end].clone()
                listed[rank][key] = {"parameter": name, "kind": kind, "begin": begin, "end": end,
                                     "crc32c": f"{_core.crc32c(tensors[rank][key]):08x}"}

    parameters = []
    for name, value in weights.items():
        is_frozen = name in frozen
        parameters.append({"name": name, "shape": list(value.shape), "strides": list(value.stride()), "dtype": dtype,
                           "group": -1 if is_frozen else int(value.dim() < 2), "steps": 0 if is_frozen else 4})
        if name in excluded:
            parameters[-1]["excluded"] = True
            continue
        if is_frozen or dtype == "fp32":
            add("param", name, value.to(compute))
        else:
            add("fp32", name, value)
        for kind, values in states.items():
            if not is_frozen:
                add(kind, name, values[name])
    files = {}
    for rank in range(ranks):
        file = f"rank_{rank}.safetensors"
        save_file(tensors[rank], os.path.join(folder, file))
        files[file] = {"bytes": os.path.getsize(os.path.join(folder, file)), "tensors": listed[rank]}
    text, state_tensors = encode({"buffers": {}, "client_state": {}, "lr_scheduler": None, **(python_state or {})})
    with open(os.path.join(folder, "state.json"), "w") as file:
        file.write(text)
    save_file(state_tensors, os.path.join(folder, "state.safetensors"))
    for file in ("state.json", "state.safetensors"):
        data = torch.tensor(list(open(os.path.join(folder, file), "rb").read()), dtype=torch.uint8)
        files[file] = {"bytes": len(data), "crc32c": f"{_core.crc32c(data):08x}"}
    options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "bias_correction": True}
    manifest = {"format": 2, "unshard_version": "0.1.0", "torch_version": torch.__version__, "tag": tag, "world_size": ranks, "stage": 2,
                "optimizer": {"type": "adamw", "states": list(states)},
                "counters": {"micro_steps": 4, "global_steps": 4, "global_samples": 16, "skipped_steps": 0, "applied_updates": 4,
                             "accumulation_steps": 1},
                "groups": [{**options, "weight_decay": 0.1}, {**options, "weight_decay": 0.0}], "initial_groups": [],
                "parameters": parameters, "shared": dict(shared), "files": files, **more}
    with open(os.path.join(folder, "manifest.json"), "w") as file:
        json.dump(manifest, file, indent=1)
    if latest:
        with open(os.path.join(save_dir, "latest"), "w") as file:
            file.write(tag)
    return folder
