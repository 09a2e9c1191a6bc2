"""What torch.compile and eager higher-order operators need to know of partitioned parameters."""
import torch

from unshard import owners

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


def backend_for(backend):
    """`backend`, but Inductor's kernels, which take pointers, find the parameters among a graph's inputs whole while the graph runs."""
    return _inductor if backend == "inductor" else backend


def _inductor(graph, example_inputs, **options):
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    with config.patch(enable_autograd_cache=False):       # a hit there would bring back the callable without its wrapping
        return compile_fx(graph, example_inputs, inner_compile=_compile_held, **options)


def _compile_held(*args, **keywords):
    """Inductor's compiler of one forward or backward graph, with the result's callable wrapped."""
    from torch._inductor.compile_fx import compile_fx_inner
    compiled = compile_fx_inner(*args, **keywords)
    inner = compiled.current_callable

    def run(inputs):
        held = {}
        for value in inputs:
            owner = owners.find(value) if isinstance(value, torch.Tensor) else None
            if owner is not None and owner.store.info(owner.id)["partitioned"]:
                held.setdefault(owner.store, []).append(owner.id)
        for store, ids in held.items():
            store.pin(ids)
        try:
            return inner(inputs)
        finally:
            for store, ids in held.items():
                store.unpin(ids)
    compiled.current_callable = run
    return compiled
