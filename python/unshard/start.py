"""`initialize`: from a model and a DeepSpeed JSON to an engine."""
import contextlib
import itertools

import torch

from unshard import compiling, distributed, optim, owners, raw_reads, schedules, zero
from unshard.config import choose, load_config
from unshard.core import ConfigError, _core
from unshard.engine import DeepSpeedEngine, Engine, make_source
from unshard.monitor import MonitorMaster, MonitorSettings
from unshard.optimizer import ClientOptimizer, refuse_pieces

# A frozen parameter may be unfrozen later, unless it is of another dtype (quantised weights, tables of indices).
_TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RUNNING_STATISTICS = (torch.nn.modules.batchnorm._NormBase,)
_numbers = itertools.count()        # engines are made, and destroyed together, in this order on every rank


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None,
               distributed_port=29500, mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None,
               config_params=None, deepspeed_defaults=False):
    """Make an engine of `model`. All ranks call it.

    Parameters
    ----------
    args : object, optional
        Its `deepspeed_config` is the path of the JSON when `config` isn't given.
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer or callable(parameters), optional
        Goes before the JSON's. Run on each rank's shards.
    model_parameters : iterable of parameters or of group dicts, optional
        What the JSON's optimizer (or the callable) updates; default: all of the model's.
    training_data : Dataset, optional
    lr_scheduler : scheduler or callable(optimizer), optional
        Goes before the JSON's.
    config, config_params : dict, path or base64 text
    deepspeed_defaults : bool
        As in DeepSpeed: gradient_clipping absent from the JSON means 1.0, engine.train() returns None, engine.loss_scale() is the JSON's.

    Returns
    -------
    (engine, optimizer, training_dataloader, lr_scheduler); the last three may be None.

    Raises
    ------
    ConfigError, ValueError, CommError
    """
    if not isinstance(model, torch.nn.Module):
        hint = "; the first positional argument is `args`: write model=..., config=..." if isinstance(args, torch.nn.Module) else ""
        raise ValueError(f"[initialize] model must be a torch.nn.Module, got {type(model).__name__}{hint}")
    if mesh_param is not None:
        raise NotImplementedError("[initialize] mesh_param isn't available in unshard yet")
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise NotImplementedError("[initialize] an mpu with model parallelism isn't available in unshard yet")
    with zero.suspended():
        distributed.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
        config, config_dict = load_config(choose(args, config, config_params), torch.distributed.get_world_size(), deepspeed_defaults)
        if torch.distributed.get_rank() == 0:
            for notice in config.notices():
                _core.log_info(notice)
        monitor = MonitorMaster(MonitorSettings.of(config_dict))
        kind = DeepSpeedEngine if deepspeed_defaults else Engine
        engine = _make_engine(kind, model, config, config_dict, optimizer, model_parameters)
        engine.mpu, engine.collate_fn, engine.monitor, engine.training_data = mpu, collate_fn, monitor, training_data
        engine.lr_scheduler = _scheduler(lr_scheduler, config, engine)
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
        if config.dump_state and engine.global_rank == 0:
            _core.log_info("\n".join(f"{key} = {value} ({origin})" for key, value, origin in config.table()))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _make_engine(kind, model, config, config_dict, client, model_parameters):
    device = distributed.device_of_this_rank()
    if device.type != "cpu":
        model.to(device)
    _cast_buffers(model, config)
    inner = _inner_optimizer(model, config, client, model_parameters)
    handle, face = _core_optimizer(inner, config)
    store = _store_of(model, config)
    comm = _core_comm(store, config)
    if store is not None:
        comm.barrier("initialize")                        # one that is made is a meeting of all ranks anyway
    owners.let_go_of_abandoned()                          # nobody reads any more from what this rank has dropped
    compiling.admit_higher_order_operators()
    raw_reads.install()
    number = next(_numbers)
    name = f"engine{number}" if number else ""
    # The optimizer is brought from here, and the schedule is moved here, through the groups that users see.
    with _quoted(comm):
        core = _core.Engine(list(model.named_parameters()), config.without_optimizer(), comm, groups=_groups(model, inner),
                            optimizer=handle, store=store, source=make_source(model), hidden_size=_hidden_size(model),
                            name=name, alike=_brought_from_here(config, inner))
    engine = kind(model, core, config, config_dict, device, None if inner is None else (inner, handle),
                  client if isinstance(client, torch.optim.Optimizer) else None, distributed.world_from_environment()[2])
    engine._number = number
    if core.writes_timeline and engine.global_rank == 0:
        engine._recording = owners.record_timeline(config.unshard.timeline, name, engine.world_size)
    engine._client_face = face
    if face is not None:
        face.bind({p: engine._ids[name] for p, name in engine._names.items()})
    return engine


@contextlib.contextmanager
def _quoted(comm):
    """An exception in here is what ranks that still wait for this one are told when it lets go of `comm`; without one, what an earlier try
    left is taken back."""
    try:
        yield
        comm.set_departure("")
    except BaseException as error:
        comm.set_departure(f"{type(error).__name__}: {error} (in initialize)")
        raise


def _brought_from_here(config, inner):
    """What the core isn't told of optimizer and schedule, but must be alike on all ranks."""
    rows = [f"{key} = {value}" for key, value, _ in config.table() if key.startswith(("optimizer.", "scheduler."))]
    kind = "none" if inner is None else type(inner).__qualname__
    return [*rows, f"class of the optimizer = {kind}"]


def _cast_buffers(model, config):
    """Buffers as `data_types` asks. Else they keep their dtype, but for running statistics: torch's kernels want those in the dtype of the
    scale and bias beside them, which become 16-bit."""
    if config.buffer_dtype is not None:
        buffers, dtype = list(model.buffers()), config.buffer_dtype
    else:
        norms = [m for m in model.modules() if isinstance(m, _RUNNING_STATISTICS) and m.weight is not None]
        buffers, dtype = [b for m in norms for b in (m.running_mean, m.running_var) if b is not None], config.compute_dtype()
    for buffer in buffers:
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _inner_optimizer(model, config, client, model_parameters):
    """The optimizer whose groups and formula count: the client's, made by the client's function, or the JSON's; None: evaluation only."""
    if isinstance(client, torch.optim.Optimizer):
        return client
    parameters = [p for p in model.parameters()] if model_parameters is None else list(model_parameters)
    if client is not None:
        if not callable(client):
            raise ValueError(f"[initialize] optimizer must be a torch.optim.Optimizer or a function, got {type(client).__name__}")
        made = client(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"[initialize] the optimizer function returned {type(made).__name__}, not a torch.optim.Optimizer")
        return made
    if not parameters or not config.optimizer.type:
        return None
    return optim.from_config(config.optimizer, parameters)


def _core_optimizer(inner, config):
    """(the engine's optimizer, the face that runs a client's own or None)"""
    if inner is None:
        return None, None
    if isinstance(inner, optim.FusedOptimizer):
        return inner.core_optimizer(), None
    refuse_pieces(type(inner).__name__, config.zero.stage, torch.distributed.get_world_size())
    face = ClientOptimizer(inner)
    return _core.python_optimizer(face), face


def _groups(model, inner):
    """[(names, hyperparameters)] in the order of the optimizer's groups."""
    if inner is None:
        return []
    names = {p: name for name, p in model.named_parameters()}
    groups, seen = [], set()
    for index, group in enumerate(inner.param_groups):
        members = []
        for p in group["params"]:
            if p not in names:
                raise ValueError(f"[initialize] group {index} of the optimizer has a parameter of shape {list(p.shape)} that isn't the "
                                 "model's; build the optimizer from the parameters of the model that is passed")
            if names[p] not in seen and (p.requires_grad or p.dtype in _TRAINED_DTYPES):
                members.append(names[p])
                seen.add(names[p])
        groups.append((members, optim.group_options(group)))
    return groups


def _store_of(model, config):
    """The store that zero.Init put the model's parameters in, or None. Those of other stores become whole again first."""
    found = []
    for parameter in model.parameters():
        owner = owners.find(parameter)
        if owner is None:
            continue
        if owner.engine is not None:
            name = next(n for n, p in model.named_parameters() if p is parameter)
            raise ValueError(f"[initialize] parameter '{name}' belongs to another engine; call destroy() on that one first")
        if owner.store not in found:
            found.append(owner.store)
    keep = found[0] if found and config.zero.stage == 3 else None
    for store in found:
        if store != keep:
            owners.forget([p for p in model.parameters() if (o := owners.find(p)) is not None and o.store == store])
            store.release_all()
    return keep


def _core_comm(store, config):
    return distributed.make_communicator(config.unshard) if store is None else store.comm


def _hidden_size(model):
    """What models say of their width, for "auto" values; 0: the engine estimates it."""
    config = getattr(model, "config", None)
    for name in ("hidden_size", "n_embd", "d_model"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    sizes = getattr(config, "hidden_sizes", None)
    return max(sizes) if isinstance(sizes, (list, tuple)) and sizes else 0


def _scheduler(scheduler, config, engine):
    inner = engine.basic_optimizer
    if scheduler is None:
        if not config.scheduler.type:
            return None
        if inner is None:
            raise ConfigError(f"[config] scheduler.type '{config.scheduler.type}' needs an optimizer; name one or pass one")
        return schedules.from_config(config.scheduler, inner)
    if callable(scheduler) and (isinstance(scheduler, type) or not hasattr(scheduler, "step")):
        if inner is None:
            raise ValueError("[initialize] lr_scheduler is a function of the optimizer, but there is no optimizer")
        return scheduler(inner)
    return scheduler


