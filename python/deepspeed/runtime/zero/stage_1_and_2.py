"""Stages 1 and 2 under their old path: the memory estimators, and the optimizer's class."""
from unshard import memory_estimates as _estimates
from unshard.optimizer import EngineOptimizer as DeepSpeedZeroOptimizer


def estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node=1, num_nodes=1, cpu_offload=True, additional_buffer_factor=1.5):
    """(bytes of a host, bytes of a device)"""
    made = _estimates.zero2(total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor)
    return made.host_bytes, made.device_bytes


def estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5):
    """Print a table for `model`."""
    print(_estimates.zero2_table(_estimates.sizes_of(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero2_model_states_mem_needs_all_cold(total_params, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5):
    """Print a table for a model of that size."""
    print(_estimates.zero2_table(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor))


__all__ = ["DeepSpeedZeroOptimizer", "estimate_zero2_model_states_mem_needs", "estimate_zero2_model_states_mem_needs_all_cold",
           "estimate_zero2_model_states_mem_needs_all_live"]
