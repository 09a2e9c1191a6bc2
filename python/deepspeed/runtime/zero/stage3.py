"""Stage 3 under its old path: the memory estimators, and the optimizer's class."""
from unshard import memory_estimates as _estimates
from unshard.optimizer import EngineOptimizer as DeepSpeedZeroOptimizer_Stage3


def estimate_zero3_model_states_mem_needs(total_params, largest_layer_params, num_gpus_per_node=1, num_nodes=1, cpu_offload=True,
                                          cpu_offload_params=True, zero_init=True, additional_buffer_factor=1.5):
    """(bytes of a host, bytes of a device, bytes of the largest layer)"""
    made = _estimates.zero3(total_params, largest_layer_params, num_gpus_per_node, num_nodes, cpu_offload, cpu_offload_params, zero_init,
                            additional_buffer_factor)
    return made.host_bytes, made.device_bytes, made.largest_layer_bytes


def estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5):
    """Print a table for `model`."""
    print(_estimates.zero3_table(*_estimates.sizes_of(model), num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_cold(total_params, largest_layer_params, num_gpus_per_node=1, num_nodes=1,
                                                   additional_buffer_factor=1.5):
    """Print a table for a model of that size."""
    print(_estimates.zero3_table(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor))


__all__ = ["DeepSpeedZeroOptimizer_Stage3", "estimate_zero3_model_states_mem_needs", "estimate_zero3_model_states_mem_needs_all_cold",
           "estimate_zero3_model_states_mem_needs_all_live"]
