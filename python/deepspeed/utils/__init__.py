"""deepspeed.utils: access to masters, gradients and states; logging; small helpers."""
from unshard import access as _access
from unshard.access import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state, safe_get_local_fp32_param,
                            safe_get_local_grad, safe_get_local_optimizer_state, safe_set_full_grad, safe_set_full_optimizer_state,
                            safe_set_local_grad, safe_set_local_optimizer_state, safe_update_full_grad_vectorized)
from unshard.data import RepeatingLoader
from unshard.on_device import OnDevice

from deepspeed._names import attribute_table
from deepspeed.utils.logging import log_dist, log_dist_once, logger, set_log_level_from_string
from deepspeed.utils.module_utils import recursive_getattr, recursive_setattr
from deepspeed.utils.z3_leaf_module import (get_z3_leaf_modules, set_z3_leaf_module, set_z3_leaf_modules, set_z3_leaf_modules_by_name,
                                            set_z3_leaf_modules_by_suffix, unset_z3_leaf_modules, z3_leaf_module, z3_leaf_parameter)


def safe_set_full_fp32_param(param, value):
    """Set the master weights, whole; the parameter that forward sees follows at the next update."""
    _access.safe_set_full_fp32_param(param, value, at_next_update=True)


def safe_set_local_fp32_param(param, value):
    """Set this rank's piece of them; the parameter follows at the next update."""
    _access.safe_set_local_fp32_param(param, value, at_next_update=True)


__getattr__, __dir__ = attribute_table(__name__, {}, modules=("groups", "init_on_device", "logging", "module_utils", "tensor_fragment",
                                                                 "timer", "z3_leaf_module", "zero_to_fp32",
                                                                 "zero_to_torch"))
__all__ = ["OnDevice", "RepeatingLoader", "get_z3_leaf_modules", "log_dist", "log_dist_once", "logger", "recursive_getattr",
           "recursive_setattr", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
           "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param",
           "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
           "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized", "set_log_level_from_string", "set_z3_leaf_module",
           "set_z3_leaf_modules", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules",
           "z3_leaf_module", "z3_leaf_parameter"]
