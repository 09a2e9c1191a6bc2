"""deepspeed.checkpointing: activation checkpointing by torch's own function, which works on partitioned parameters as it is."""
import torch.utils.checkpoint

from deepspeed._names import attribute_table

# The switches last given to configure(), for is_configured() and for scripts that read them back.
_switches = {}


def configure(mpu_=None, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None, num_checkpoints=None,
              checkpoint_in_cpu=None, synchronize=None, profile=None):
    """Accepts DeepSpeed's switches. Those that move or split activations aren't built yet and are refused."""
    wanted = {"partition_activations": partition_activations, "contiguous_checkpointing": contiguous_checkpointing,
              "checkpoint_in_cpu": checkpoint_in_cpu}
    for name, value in wanted.items():
        if value:
            raise NotImplementedError(f"[checkpointing.configure] {name}={value!r} is not available in unshard yet; leave it out")
    _switches.update(wanted, num_checkpoints=num_checkpoints, synchronize=synchronize, profile=profile)


def is_configured():
    """Whether configure() was called since the last reset()."""
    return bool(_switches)


def reset():
    """Forget configure()."""
    _switches.clear()


def checkpoint(function, *args):
    """Run `function(*args)` keeping only its inputs; recomputed in backward."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)


def non_reentrant_checkpoint(function, *args):
    """The same by torch's non-reentrant form."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


__getattr__, __dir__ = attribute_table(__name__, {})
__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
