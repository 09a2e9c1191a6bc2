"""What torch.compile and eager higher-order operators need to know of partitioned parameters."""
import torch

_KEYS = ("DeferredInit", "CustomRNGKeyId")      # the dispatch keys that partitioned parameters carry


def admit_higher_order_operators():
    """torch.cond and its kind have no kernel for the keys of partitioned parameters; let their calls fall through to the next key.

    Idempotent; called again when an engine starts or compiles, for operators registered since.
    """
    keys = [torch._C._dispatch_key_parse(name) for name in _KEYS]
    for operator in list(getattr(torch._ops, "_higher_order_ops", {}).values()):
        remaining = getattr(operator, "non_fallthrough_keys", None)
        if remaining is not None:
            for key in keys:
                remaining = remaining.remove(key)
            operator.non_fallthrough_keys = remaining
