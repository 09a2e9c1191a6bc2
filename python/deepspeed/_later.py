"""Names of DeepSpeed's that unshard doesn't have yet, and what becomes of them.

`import deepspeed.pipe` fails with one line that says so. `from deepspeed import PipelineModule` gives a `Placeholder`, so that a script
which imports more than it uses runs; calling it, making a subclass of it or taking an attribute of it fails with that line.
"""
import importlib.machinery
import sys

# {package: submodules}
MODULES = {
    "deepspeed": "autotuning compat compile constants datastates elasticity inference io linear "
                 "model_implementations module_inject nebula nvme pipe profiling sequence",
    "deepspeed.accelerator": "cpu_accelerator cuda_accelerator hpu_accelerator mps_accelerator npu_accelerator xpu_accelerator",
    "deepspeed.checkpoint": "constants deepspeed_checkpoint reshape_3d_utils reshape_meg_2d reshape_utils universal_checkpoint "
                            "zero_checkpoint",
    "deepspeed.comm": "backend ccl config constants reduce_op torch utils",
    "deepspeed.launcher": "constants launch launcher_helper multinode_runner",
    "deepspeed.moe": "ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch experts fused_expert_layout layer mappings "
                     "sharded_moe",
    "deepspeed.ops": "aio compile deepspeed4science fp_quantizer gds muon op_builder quantizer random_ltd sparse_attention "
                     "transformer triton_ops",
    "deepspeed.ops.adam": "multi_tensor_apply zenflow_cpu_adam zenflow_torch_adam",
    "deepspeed.ops.lion": "multi_tensor_apply",
    "deepspeed.runtime": "bf16_optimizer checkpoint_engine comm compiler config_utils constants data_pipeline "
                         "domino eigenvalue fp16 hybrid_engine model_checkpointing pipe progressive_layer_drop "
                         "quantize sequence_parallel sparse_tensor state_dict_factory superoffload swap_tensor tensor_parallel "
                         "torch_autocast weight_quantizer zenflow",
    "deepspeed.runtime.zero": "config contiguous_memory_allocator leaf_module_config linear mics muon offload_states "
                              "parameter_offload partitioned_param_coordinator partitioned_param_profiler utils",
    "deepspeed.utils": "bwc comms_logging config debug exceptions mixed_precision_linkage numa nvtx "
                       "torch types",
}
# {module: names in it}
NAMES = {
    "deepspeed": "DeepSpeedHybridEngine DeepSpeedInferenceConfig DeepSpeedTransformerConfig DeepSpeedTransformerLayer "
                 "DualPipeVEngine DualPipeVModule PipelineEngine PipelineModule "
                 "replace_transformer_layer revert_transformer_layer set_autotp_mode tp_model_init",
    "deepspeed.checkpointing": "CheckpointFunction",
    "deepspeed.runtime.utils": "CheckOverflow PartitionedTensor",
    "deepspeed.zero": "DeepSpeedZeroConfig MiCS_Init",
}
MODULES = {package: frozenset(names.split()) for package, names in MODULES.items()}
NAMES = {module: frozenset(names.split()) for module, names in NAMES.items()}
NAMES["deepspeed.runtime.zero"] = NAMES["deepspeed.zero"]


class NotAvailable(NotImplementedError):
    """A name of DeepSpeed's that unshard doesn't have yet."""

    def __init__(self, name):
        super().__init__(f"{name} is not available in unshard yet: leave it out, or run this script with DeepSpeed itself "
                         "(docs/differences.md, \"Not there yet\")")


class NameNotAvailable(NotAvailable, AttributeError):
    """The same for an attribute: `hasattr` is False."""


class ModuleNotAvailable(NotAvailable, ImportError):
    """The same for a module: `except ImportError` catches it."""


class Placeholder:
    """What `from deepspeed import NAME` gives for such a name. Nothing is an instance of it."""

    def __init__(self, name):
        self.__dict__["_placeholder_of"] = name

    def __repr__(self):
        return f"<{self._placeholder_of}: not available in unshard yet>"

    def __call__(self, *args, **keywords):
        raise NotAvailable(self._placeholder_of)

    def __mro_entries__(self, bases):
        raise NotAvailable(self._placeholder_of)

    def __getattr__(self, name):
        raise NameNotAvailable(self.__dict__["_placeholder_of"])

    def __instancecheck__(self, instance):
        return False

    def __subclasscheck__(self, subclass):
        return False


def is_later(module, name):
    return name in MODULES.get(module, ()) or name in NAMES.get(module, ())


class Finder:
    """Asked by Python's import after all others."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        module, _, name = fullname.rpartition(".")
        if name in NAMES.get(module, ()):
            return importlib.machinery.ModuleSpec(fullname, Finder)
        if name in MODULES.get(module, ()):
            raise ModuleNotAvailable(fullname)
        return None

    @staticmethod
    def create_module(spec):
        return Placeholder(spec.name)

    @staticmethod
    def exec_module(module):
        """Nothing to run."""


def install():
    """Idempotent."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
