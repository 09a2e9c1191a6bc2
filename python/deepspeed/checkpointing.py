"""deepspeed.checkpointing: activation checkpointing under DeepSpeed's names. One set of switches and random states a process, as its
functions have no other place for them."""
from unshard.activation_checkpointing import ActivationCheckpointing
from unshard.rng_states import RngStates as CudaRNGStatesTracker
from unshard.rng_states import seed_for_model_parallelism

from deepspeed._names import attribute_table

_process = ActivationCheckpointing()
_model_parallel = {"mpu": None}


def configure(mpu_=None, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None, num_checkpoints=None,
              checkpoint_in_cpu=None, synchronize=None, profile=None):
    """Set DeepSpeed's switches, from a JSON or one by one."""
    _model_parallel["mpu"] = mpu_
    _process.configure(deepspeed_config, partition_activations=partition_activations,
                       contiguous_memory_optimization=contiguous_checkpointing, number_checkpoints=num_checkpoints,
                       cpu_checkpointing=checkpoint_in_cpu, synchronize_checkpoint_boundary=synchronize, profile=profile)


def is_configured():
    """Whether configure() was called since the last reset()."""
    return _process.configured


def reset():
    """Forget configure()."""
    _process.reset()


def checkpoint(function, *args, **kwargs):
    """Run `function(*args)` keeping its inputs only; recomputed in backward."""
    return _process.checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function, *args):
    """The same by torch's non-reentrant form."""
    return _process.checkpoint(function, *args, use_reentrant=False)


def partition_activations_in_checkpoint(partition_activation):
    """Set that switch alone."""
    _process.switch(partition_activations=partition_activation)


def get_cuda_rng_tracker():
    """The named random states."""
    return _process.rng_states


def model_parallel_cuda_manual_seed(seed):
    """Seed the device's generator, and a state of its own for each model-parallel rank."""
    mpu = _model_parallel["mpu"]
    seed_for_model_parallelism(_process.rng_states, seed, 0 if mpu is None else mpu.get_model_parallel_rank())


__getattr__, __dir__ = attribute_table(__name__, {})
__all__ = ["CudaRNGStatesTracker", "checkpoint", "configure", "get_cuda_rng_tracker", "is_configured",
           "model_parallel_cuda_manual_seed", "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset"]
