"""DeepSpeed's public names over Unshard: names and defaults only, no logic. Loaded piece by piece, when a name is first used."""
import importlib.util

from deepspeed._names import NotAvailable, attribute_table

__version__ = "0.19.8"                   # whose API and defaults these are; scripts and libraries compare it
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__ = __git_branch__ = None

_MODULES = ("accelerator", "checkpoint", "checkpointing", "comm", "compression", "launcher", "moe", "monitor", "ops", "runtime", "utils",
            "zero")
_HOME = {
    "DeepSpeedEngine": ("unshard.engine", "DeepSpeedEngine"),
    "DeepSpeedOptimizer": ("unshard.optimizer", "EngineOptimizer"),
    "ZeROOptimizer": ("unshard.optimizer", "EngineOptimizer"),
    "DeepSpeedDataLoader": ("unshard.data", "EngineDataLoader"),
    "DeepSpeedConfig": ("deepspeed.runtime.config", "DeepSpeedConfig"),
    "DeepSpeedConfigError": ("unshard", "ConfigError"),
    "OnDevice": ("unshard.on_device", "OnDevice"),
    "InferenceEngine": ("unshard.inference.injected", "InferenceEngine"),
    "default_inference_config": ("unshard.inference.injected", "default_inference_config"),
    "init_inference": ("unshard.inference.injected", "init_inference"),
    "initialize": ("deepspeed._start", "initialize"),
    "init_distributed": ("deepspeed.comm.comm", "init_distributed"),
    "add_config_arguments": ("deepspeed._start", "add_config_arguments"),
    "get_accelerator": ("deepspeed.accelerator", "get_accelerator"),
    "log_dist": ("deepspeed.utils", "log_dist"),
    "logger": ("deepspeed.utils", "logger"),
    "dist": ("deepspeed", "comm"),
}

__getattr__, __dir__ = attribute_table(__name__, _HOME, _MODULES)
__all__ = ["NotAvailable", "__version__", *_HOME, *_MODULES]
HAS_TRITON = importlib.util.find_spec("triton") is not None
