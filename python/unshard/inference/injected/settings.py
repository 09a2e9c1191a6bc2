"""What init_inference may be told, under DeepSpeed's names."""
import dataclasses
import difflib
import json
import types

import torch

from unshard.loggers import logger

_DTYPES = {"fp32": torch.float32, "float32": torch.float32, "float": torch.float32, "bf16": torch.bfloat16,
           "bfloat16": torch.bfloat16, "bfloat": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
           "int8": torch.int8}
_ALIASES = {"kernel_inject": "replace_with_kernel_inject", "tp": "tensor_parallel", "tm": "triangular_masking",
            "max_tokens": "max_out_tokens", "min_tokens": "min_out_tokens", "ckpt_config": "checkpoint_config",
            "injection_dict": "injection_policy", "args": "config", "expert_group": "ep_group", "expert_mp_group": "ep_mp_group"}
# Values that ask for nothing, or for what happens anyway. Another value of a key of this table is an error.
_ONLY = {"use_triton": (False,), "moe": ({}, False, None), "quant": ({}, {"enabled": False}, None), "checkpoint": (None,),
         "save_mp_checkpoint_path": (None,), "injection_policy_tuple": (None,), "mpu": (None,), "ep_size": (1,), "ep_group": (None,),
         "ep_mp_group": (None,)}
# Of DeepSpeed's kernels and of checkpoints that it loads: another value is an error with kernels, and warned of without.
_OF_KERNELS = {"triangular_masking": (True,), "transposed_mode": (False,), "training_mp_size": (1,), "set_empty_params": (False,),
               "base_dir": ("",), "checkpoint_config": ({}, None)}
# Ways of computing the same; another value than these is warned of.
_SAME_NUMBERS = {"enable_cuda_graph": (False,), "zero": ({}, None)}
_WITHOUT_EFFECT = {"triton_autotune", "keep_module_on_host", "return_tuple", "replace_method", "config", "moe_experts", "moe_type",
                   "min_out_tokens"}


@dataclasses.dataclass
class InferenceSettings:
    dtype: torch.dtype = torch.float16             # DeepSpeed's default
    tp_size: int = 1
    kernels: bool = False                          # replace_with_kernel_inject
    max_out_tokens: int = 1024
    input_limit: int | None = None                 # max_out_tokens where it is said: generate() takes no longer input
    injection_policy: dict = dataclasses.field(default_factory=dict)         # {class of module: names of its last linear layers}

    # DeepSpeed's names of the same.
    replace_with_kernel_inject = property(lambda self: self.kernels)
    tensor_parallel = property(lambda self: types.SimpleNamespace(enabled=True, tp_size=self.tp_size))

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
        settings.max_out_tokens = _count(values.get("max_out_tokens"), "max_out_tokens", 1024)
        settings.input_limit = values.pop("max_out_tokens", None)
        settings.injection_policy = values.pop("injection_policy", None) or {}
        if settings.injection_policy and settings.kernels:
            raise ValueError("[init_inference] injection_policy and replace_with_kernel_inject=True: give one of them")
        for key, value in values.items():
            _check_rest(key, value, settings.kernels)
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


def default_inference_config():
    """DeepSpeed's keys and defaults, as a dict of your own."""
    return {**{key: allowed[0] for key, allowed in {**_ONLY, **_OF_KERNELS, **_SAME_NUMBERS}.items()}, "dtype": torch.float16,
            "replace_with_kernel_inject": False, "tensor_parallel": {"enabled": True, "tp_size": 1}, "mp_size": 1, "max_out_tokens": 1024,
            "min_out_tokens": 1, "injection_policy": None, "triton_autotune": False, "keep_module_on_host": False, "return_tuple": True,
            "replace_method": "auto", "config": None, "moe_experts": [1], "moe_type": "standard", "zero": {}, "moe": {}, "quant": {},
            "checkpoint_config": {}}


def _check_rest(key, value, kernels):
    if (key in _ONLY and value not in _ONLY[key]) or (kernels and key in _OF_KERNELS and not _asks_nothing(key, value)):
        raise NotImplementedError(f"[init_inference] {key}={value!r} isn't built; leave it out")
    if key in _OF_KERNELS or key in _SAME_NUMBERS:
        if not _asks_nothing(key, value):
            logger.warning(f"[init_inference] {key}={value!r} has no effect here: the same is computed without it")
        return
    if key in _ONLY or key in _WITHOUT_EFFECT:
        return
    known = [*_ONLY, *_OF_KERNELS, *_SAME_NUMBERS, *_WITHOUT_EFFECT, *_ALIASES, "injection_policy", "dtype", "tensor_parallel", "mp_size",
             "replace_with_kernel_inject", "max_out_tokens"]
    near = difflib.get_close_matches(key, known, 1)
    raise ValueError(f"[init_inference] there is no key '{key}'" + (f"; did you mean '{near[0]}'?" if near else ""))


def _asks_nothing(key, value):
    empty = isinstance(value, dict) and not any(value.values())                 # {"checkpoint_dir": None}, {"stage": 0}
    return empty or value in {**_OF_KERNELS, **_SAME_NUMBERS}[key]


def _dtype(value):
    found = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if found not in _DTYPES.values():
        raise ValueError(f"[init_inference] dtype is {value!r}; torch.float32, bfloat16, float16 and int8 are accepted")
    return found


def _boolean(value, key):
    if not isinstance(value, bool):
        raise ValueError(f"[init_inference] {key} is {value!r}; true or false is wanted")
    return value


def _count(value, key, otherwise=1):
    if value is None:
        return otherwise
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
