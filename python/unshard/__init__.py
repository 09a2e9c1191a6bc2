"""Unshard: train models that don't fit one device, from an unchanged DeepSpeed JSON.

    engine, optimizer, loader, scheduler = unshard.initialize(model=model, config="ds_config.json")

Importing this package is cheap: torch and the C++ engine are loaded when a name is first used.
"""
import importlib

__version__ = "0.1.0"

_NAMES = {
    "start": ["initialize"],
    "engine": ["Engine", "destroy_all"],
    "zero": ["Init", "GatheredParameters", "whole", "register_external_parameter", "unregister_external_parameter"],
    "distributed": ["init_distributed", "make_communicator"],
    "access": [
        "safe_get_full_fp32_param", "safe_set_full_fp32_param", "safe_get_full_grad", "safe_set_full_grad",
        "safe_get_full_optimizer_state", "safe_set_full_optimizer_state", "safe_get_local_fp32_param", "safe_set_local_fp32_param",
        "safe_get_local_grad", "safe_set_local_grad", "safe_get_local_optimizer_state", "safe_set_local_optimizer_state",
        "safe_update_full_grad_vectorized", "residency_stats", "comm_counts", "reset_comm_counts",
    ],
    "config": ["load_config"],
    "data": ["RepeatingLoader"],
    "inference.embedder": ["Embedder"],
    "inference.llm": ["LLM"],
    "inference.sampling": ["SamplingParams"],
    "_core": ["ConfigError", "CommError", "CheckpointError", "Communicator", "Config"],
}
_MODULES = ("access", "cli", "config", "data", "distributed", "engine", "inference", "launcher", "optim", "schedules", "start", "zero")
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name):
    if name in _HOME:
        home = _HOME[name]
        if home == "_core":
            importlib.import_module("torch")           # the engine's library finds torch's already loaded
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'unshard' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOME, *_MODULES])
