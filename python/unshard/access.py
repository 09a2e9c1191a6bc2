"""Whole tensors (or this rank's pieces) of masters, gradients and optimizer state, by parameter. The "full" forms are collective."""
import torch

from unshard import owners

# What users of torch call a state, where the engine has another name for it.
_STATE_NAMES = {"momentum": "momentum_buffer"}


def _engine_of(parameter, function):
    owner = owners.find(parameter)
    if owner is None or owner.engine is None:
        raise ValueError(f"[{function}] the parameter of shape {list(parameter.shape)} belongs to no engine; pass a parameter of the model "
                         "that initialize() got")
    return owner.engine, owner.id


def _shaped(value, parameter):
    return None if value is None else value.view(parameter.shape)


def _checked(value, parameter, function):
    value = torch.as_tensor(value)
    if value.numel() != parameter.numel():
        raise ValueError(f"[{function}] the value has shape {list(value.shape)}, the parameter {list(parameter.shape)}")
    return value.detach().reshape(parameter.shape)


def safe_get_full_fp32_param(param):
    """The fp32 master weights (or the parameter itself when it is fp32), whole, on every rank."""
    engine, id = _engine_of(param, "safe_get_full_fp32_param")
    if id in engine._waiting_values:
        return engine._waiting_values[id].clone()
    return _shaped(engine._core.full_fp32_param(id), param)


def safe_set_full_fp32_param(param, value, at_next_update=False):
    """Set master weights and parameter to `value` (same on every rank).

    With `at_next_update` the parameter that forward sees follows at the next update only, as in DeepSpeed, whose masters are another copy.
    """
    engine, id = _engine_of(param, "safe_set_full_fp32_param")
    value = _checked(value, param, "safe_set_full_fp32_param").to(torch.float32)
    if at_next_update:
        engine._waiting_values[id] = value.clone()
    else:
        engine._waiting_values.pop(id, None)
        engine._core.set_full_fp32_param(id, value)


def safe_get_full_grad(param):
    """The gradient as the update will see it before clipping: mean over ranks, unscaled; None when no rank had one. Between backward
    and step."""
    engine, id = _engine_of(param, "safe_get_full_grad")
    return _shaped(engine._core.full_grad(id), param)


def safe_set_full_grad(param, value):
    """Replace that gradient."""
    engine, id = _engine_of(param, "safe_set_full_grad")
    engine._core.set_full_grad(id, _checked(value, param, "safe_set_full_grad"))


def safe_update_full_grad_vectorized(param_list, update_func):
    """For each parameter: gradient = update_func(gradient, parameter)."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_optimizer_state(param, optim_state_key):
    """An optimizer state ("exp_avg", ...) whole; None for a name that the optimizer doesn't keep."""
    engine, id = _engine_of(param, "safe_get_full_optimizer_state")
    return _shaped(engine._core.full_state(id, _STATE_NAMES.get(optim_state_key, optim_state_key)), param)


def safe_set_full_optimizer_state(param, value, optim_state_key):
    """Set an optimizer state."""
    engine, id = _engine_of(param, "safe_set_full_optimizer_state")
    engine._core.set_full_state(id, _STATE_NAMES.get(optim_state_key, optim_state_key),
                                _checked(value, param, "safe_set_full_optimizer_state"))


def safe_get_local_fp32_param(param):
    """This rank's flat piece of the master weights."""
    engine, id = _engine_of(param, "safe_get_local_fp32_param")
    piece = engine._core.local_fp32_param(id)
    if id not in engine._waiting_values:
        return piece
    waiting = engine._waiting_values[id]
    whole = waiting.new_empty_strided(param.shape, param.stride()).copy_(waiting)       # pieces are cut in the order of the memory
    begin = 0 if piece.numel() == whole.numel() else engine.global_rank * engine._store.info(id)["shard_numel"]
    return whole.as_strided(piece.shape, (1,), begin).clone()


def safe_set_local_fp32_param(param, value, at_next_update=False):
    """Write this rank's piece; the parameter follows at once on every rank, or `at_next_update` (collective)."""
    engine, id = _engine_of(param, "safe_set_local_fp32_param")
    core, waiting, value = engine._core, engine._waiting_values.get(id), torch.as_tensor(value)
    before = core.full_fp32_param(id).clone() if at_next_update else None
    core.set_local_fp32_param(id, value)        # what isn't of the piece's size is refused here, before anything has changed
    if waiting is not None:
        core.set_full_fp32_param(id, waiting)
        core.set_local_fp32_param(id, value)
        del engine._waiting_values[id]
    if at_next_update:                          # all ranks' pieces together are what waits
        engine._waiting_values[id] = core.full_fp32_param(id).clone().view(param.shape)
        core.set_full_fp32_param(id, before.view(param.shape))


def safe_get_local_grad(param):
    """This rank's flat piece of the gradient, or None."""
    engine, id = _engine_of(param, "safe_get_local_grad")
    return engine._core.local_grad(id)


def safe_set_local_grad(param, value):
    """Replace this rank's piece of the gradient (collective)."""
    engine, id = _engine_of(param, "safe_set_local_grad")
    engine._core.set_local_grad(id, torch.as_tensor(value))


def safe_get_local_optimizer_state(param, optim_state_key):
    """This rank's flat piece of an optimizer state, or None."""
    engine, id = _engine_of(param, "safe_get_local_optimizer_state")
    return engine._core.local_state(id, _STATE_NAMES.get(optim_state_key, optim_state_key))


def safe_set_local_optimizer_state(param, value, optim_state_key):
    """Write this rank's piece of an optimizer state (collective at stage 0)."""
    engine, id = _engine_of(param, "safe_set_local_optimizer_state")
    engine._core.set_local_state(id, _STATE_NAMES.get(optim_state_key, optim_state_key), torch.as_tensor(value))


def residency_stats(engine):
    """Counters of what was touched, gathered and held: touches, gathers, prefetched, live_bytes, peak_live_bytes, pinned,
    exposed_wait_ms (waited for bytes of other ranks), link_bytes (received outside shared memory); with several hosts also outside_plan
    (touches that the agreed plan didn't foresee), let_go_early (parameters let go before a slower rank of the host had used them, which may
    fetch them again), host_live_bytes and host_peak_live_bytes (memory for other hosts' pieces, per host)."""
    return engine._store.stats()


def comm_counts(engine):
    """{operation: {"calls", "bytes"}} that this rank sent (or wrote for others to read) since the start or reset_comm_counts()."""
    return {op: {"calls": calls, "bytes": count} for op, (calls, count) in engine._store.comm.counts().items()}


def reset_comm_counts(engine):
    engine._store.comm.reset_counts()
