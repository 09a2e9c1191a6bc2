"""What init_inference may be told, under DeepSpeed's names."""
import dataclasses
import difflib
import json

import torch

_DTYPES = {"fp32": torch.float32, "float32": torch.float32, "float": torch.float32, "bf16": torch.bfloat16,
           "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16, "half": torch.float16, "int8": torch.int8}
_ALIASES = {"kernel_inject": "replace_with_kernel_inject", "tp": "tensor_parallel", "tm": "triangular_masking",
            "max_tokens": "max_out_tokens", "min_tokens": "min_out_tokens", "ckpt_config": "checkpoint_config",
            "injection_dict": "injection_policy", "args": "config", "expert_group": "ep_group", "expert_mp_group": "ep_mp_group"}
# Values that ask for nothing, or for what happens anyway. Another value of a key of the first table is an error.
_ONLY = {"enable_cuda_graph": (False,), "use_triton": (False,), "zero": ({}, None), "moe": ({}, False, None), "quant": ({}, None),
         "checkpoint": (None,), "base_dir": ("",), "set_empty_params": (False,), "save_mp_checkpoint_path": (None,),
         "checkpoint_config": ({}, None), "training_mp_size": (1,), "injection_policy": (None, {}), "injection_policy_tuple": (None,),
         "mpu": (None,), "ep_size": (1,), "ep_group": (None,), "ep_mp_group": (None,), "triangular_masking": (True,),
         "transposed_mode": (False,)}
_WITHOUT_EFFECT = {"triton_autotune", "keep_module_on_host", "return_tuple", "replace_method", "config", "moe_experts", "moe_type",
                   "min_out_tokens"}


@dataclasses.dataclass
class InferenceSettings:
    dtype: torch.dtype = torch.float16             # DeepSpeed's default
    tp_size: int = 1
    kernels: bool = False                          # replace_with_kernel_inject
    max_out_tokens: int = 1024                     # tokens of prompt and output together, at least; the model's context bounds it

    @classmethod
    def of(cls, given):
        """Raises ValueError or NotImplementedError naming the key."""
        values = {}
        for name, value in given.items():
            key = _ALIASES.get(name, name)
            if key in values and values[key] != value:
                raise ValueError(f"[init_inference] '{name}' and '{key}' are one key and differ: {value!r} and {values[key]!r}")
            values[key] = value
        settings = cls()
        settings.dtype = _dtype(values.pop("dtype", torch.float16))
        settings.kernels = _boolean(values.pop("replace_with_kernel_inject", False), "replace_with_kernel_inject")
        settings.tp_size = _tp_size(values.pop("tensor_parallel", {}), values.pop("mp_size", None))
        settings.max_out_tokens = _count(values.pop("max_out_tokens", 1024), "max_out_tokens")
        for key, value in values.items():
            _check_rest(key, value)
        if settings.tp_size > 1 and not settings.kernels:
            raise NotImplementedError("[init_inference] tensor_parallel without replace_with_kernel_inject=True (AutoTP) isn't built; "
                                      "set it, or tp_size to 1")
        return settings


def merged(config, keywords):
    """One dict of both. Raises ValueError where they contradict each other."""
    if isinstance(config, str):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"[init_inference] config is {type(config).__name__}; a dict or the path of a JSON file is wanted")
    config = dict(config or {})
    for key in config.keys() & keywords.keys():
        if config[key] != keywords[key]:
            raise ValueError(f"[init_inference] '{key}' is {config[key]!r} in config and {keywords[key]!r} as an argument; say it once")
    return {**config, **keywords}


def _check_rest(key, value):
    if key in _ONLY and value not in _ONLY[key]:
        raise NotImplementedError(f"[init_inference] {key}={value!r} isn't built; leave it out")
    if key in _ONLY or key in _WITHOUT_EFFECT:
        return
    known = [*_ONLY, *_WITHOUT_EFFECT, *_ALIASES, "dtype", "tensor_parallel", "mp_size", "replace_with_kernel_inject", "max_out_tokens"]
    near = difflib.get_close_matches(key, known, 1)
    raise ValueError(f"[init_inference] there is no key '{key}'" + (f"; did you mean '{near[0]}'?" if near else ""))


def _dtype(value):
    found = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if found not in _DTYPES.values():
        raise ValueError(f"[init_inference] dtype is {value!r}; torch.float32, bfloat16, float16 and int8 are accepted")
    return found


def _boolean(value, key):
    if not isinstance(value, bool):
        raise ValueError(f"[init_inference] {key} is {value!r}; true or false is wanted")
    return value


def _count(value, key):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"[init_inference] {key} is {value!r}; a whole number of at least 1 is wanted")
    return value


def _tp_size(section, mp_size):
    if not isinstance(section, dict):                          # DeepSpeed's own config object
        section = {"tp_size": getattr(section, "tp_size", 1)}
    size = _count(section.get("tp_size", mp_size or 1), "tensor_parallel.tp_size")
    if mp_size not in (None, 1, size):
        raise ValueError(f"[init_inference] mp_size is {mp_size!r} and tensor_parallel.tp_size {size}; say it once")
    return size
