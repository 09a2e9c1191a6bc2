"""DeepSpeed's public names over Unshard: names and defaults only, no logic. Loaded piece by piece, when a name is first used."""
import importlib.util

from deepspeed._names import NotAvailable, attribute_table

__version__ = "0.19.8"                   # whose API and defaults these are; scripts and libraries compare it
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__ = __git_branch__ = None

_MODULES = ("accelerator", "checkpointing", "comm", "ops", "runtime", "utils", "zero", "launcher")
_LATER = ("checkpoint", "compile", "inference", "linear", "model_implementations", "module_inject", "moe", "monitor", "pipe", "profiling",
          "sequence", "autotuning", "nebula", "elasticity")
_HOME = {
    "DeepSpeedEngine": ("unshard.engine", "Engine"),
    "DeepSpeedOptimizer": ("unshard.optimizer", "EngineOptimizer"),
    "ZeROOptimizer": ("unshard.optimizer", "EngineOptimizer"),
    "DeepSpeedDataLoader": ("unshard.data", "EngineDataLoader"),
    "DeepSpeedConfigError": ("unshard", "ConfigError"),
    "initialize": ("deepspeed._start", "initialize"),
    "init_distributed": ("unshard.distributed", "init_distributed"),
    "add_config_arguments": ("deepspeed._start", "add_config_arguments"),
    "get_accelerator": ("deepspeed.accelerator", "get_accelerator"),
    "log_dist": ("deepspeed.utils", "log_dist"),
    "logger": ("deepspeed.utils", "logger"),
    "dist": ("deepspeed", "comm"),
}
_LATER_NAMES = ("init_inference", "default_inference_config", "tp_model_init", "set_autotp_mode", "DeepSpeedConfig", "PipelineEngine",
                "PipelineModule", "InferenceEngine", "DeepSpeedHybridEngine", "OnDevice", "DeepSpeedTransformerLayer",
                "replace_transformer_layer", "revert_transformer_layer")

__getattr__, __dir__ = attribute_table(__name__, _HOME, _MODULES, _LATER + _LATER_NAMES)
__all__ = ["NotAvailable", "__version__", *_HOME, *_MODULES]
HAS_TRITON = importlib.util.find_spec("triton") is not None
