"""deepspeed.checkpointing under its old path."""
from deepspeed.checkpointing import (CudaRNGStatesTracker, checkpoint, configure, get_cuda_rng_tracker, is_configured,
                                     model_parallel_cuda_manual_seed, non_reentrant_checkpoint, partition_activations_in_checkpoint,
                                     reset)

__all__ = ["CudaRNGStatesTracker", "checkpoint", "configure", "get_cuda_rng_tracker", "is_configured",
           "model_parallel_cuda_manual_seed", "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset"]
