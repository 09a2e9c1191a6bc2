"""Models built already partitioned, and whole values for code that needs them."""
import contextlib
import json
import operator
import threading
import weakref

import torch
import torch.distributed as dist
from torch.nn.modules import module as module_hooks

from unshard import distributed, owners, raw_reads
from unshard.config import choose, for_partitioning, load_config_dict
from unshard.core import _core
from unshard.parameter_attributes import count_inside

# Contexts entered and not left yet, innermost last, by thread: torch's registration hooks are process-wide, so each must know its turn.
_local = threading.local()


def _active():
    if not hasattr(_local, "contexts"):
        _local.contexts = []
    return _local.contexts


@contextlib.contextmanager
def suspended():
    """No zero.Init is in force inside: what is built there stays whole."""
    held, _local.contexts = _active(), []
    try:
        yield
    finally:
        _local.contexts = held


class Init(contextlib.ContextDecorator):
    """Build a model whose parameters are partitioned as each submodule is finished, so that no rank ever holds the whole.

    All ranks build the same model together. Values are those of rank 0. Used as a context, or directly with `module=` on a built one.

    Parameters
    ----------
    module : torch.nn.Module, optional
        Partition this module now; the context form isn't needed then.
    config_dict_or_path, config : dict or path, optional
        Its zero_optimization, fp16, bf16 and data_types sections count; a stage other than 3 partitions nothing.
    dtype : torch.dtype, optional
        Of floating parameters; default: what the configuration computes in, else as built.
    enabled : bool
        False: does nothing.
    remote_device, pin_memory, mem_efficient_linear, ... :
        Accepted: placement follows the configuration's offload sections, and linear layers keep no weights anyway.
    """

    def __init__(self, module=None, data_parallel_group=None, mem_efficient_linear=True, remote_device=None, pin_memory=False,
                 config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None, zero_param_parallel_group=None,
                 zero_quantized_weights=False, zero_quantized_nontrainable_weights=False, sequence_data_parallel_group=None,
                 param_swapper=None, tensor_overrides=None):
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise NotImplementedError("[zero.Init] quantised weights aren't built yet; leave zero_quantized_* off")
        if data_parallel_group is not None and data_parallel_group is not dist.group.WORLD \
                and dist.get_world_size(data_parallel_group) != dist.get_world_size():
            raise NotImplementedError("[zero.Init] a data_parallel_group smaller than the world isn't built yet")
        self._store = None
        self._modules = []
        self._handles = []
        self._dtype = dtype
        self.enabled = enabled and self._configure(config_dict_or_path if config_dict_or_path is not None else config)
        if module is not None and self.enabled:
            self._open()
            self._finish(module)
            self._store.settle()

    def _configure(self, config):
        """Reads what counts of the configuration; False when it partitions nothing."""
        self._kept = 0                                    # elements of the parameters that stay whole
        if config is None:
            config = {"zero_optimization": {"stage": 3}}
        config = load_config_dict(choose(config=config))
        self._config = _core.Config.from_json(json.dumps(for_partitioning(config)))
        self._threshold = self._config.zero.param_persistence_threshold
        return self._config.zero.stage == 3

    def _open(self):
        distributed.init_distributed()
        if self._dtype is None:
            self._dtype = self._config.compute_dtype()
        zero = self._config.zero
        self._store = _core.ParameterStore(distributed.make_communicator(self._config.unshard), zero.max_live_parameters,
                                           zero.prefetch_bucket_numel, self._config.unshard.debug)

    def __enter__(self):
        if not self.enabled:
            return self
        raw_reads.install()
        self._open()
        self._store.set_lockstep_writes(True)
        _active().append(self)
        self._handles = [module_hooks.register_module_module_registration_hook(self._on_module),
                         module_hooks.register_module_parameter_registration_hook(self._on_parameter)]
        return self

    def __exit__(self, kind, error, trace):
        if not self.enabled:
            return False
        for handle in self._handles:
            handle.remove()
        _active().remove(self)
        if kind is None:
            for reference in self._modules:               # roots, and modules that no parent has taken
                module = reference()
                if module is not None:
                    self._finish(module)
            self._store.settle()
        else:                                             # ranks that wait for this one are told, should it let go of the store now
            self._store.comm.set_departure(f"{kind.__name__}: {error} (in zero.Init)")
        self._store.set_lockstep_writes(False)
        self._modules = []
        return False

    def _mine(self):
        contexts = _active()
        return bool(contexts) and contexts[-1] is self

    def _on_parameter(self, module, name, parameter):
        """A module gets a parameter: the one that was being filled before it is done, so that a list of layers isn't held whole."""
        last = self._modules[-1]() if self._modules else None
        if not self._mine() or last is module:
            return
        if last is not None:
            self._finish(last, recurse=False)
        self._modules.append(weakref.ref(module))

    def _on_module(self, parent, name, module):
        if self._mine() and module is not None:
            self._finish(module)

    def _finish(self, module, recurse=True):
        """Partition what `module` holds and no store has yet."""
        for name, parameter in module.named_parameters(recurse=recurse):
            if owners.find(parameter) is None:
                self._take(parameter, name)

    def _take(self, parameter, name):
        if parameter.is_meta or isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            return
        if self._dtype is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
            parameter.data = parameter.data.to(self._dtype)
        if self._store.world_size > 1 and parameter.numel() > 0:
            value = parameter.data if parameter.data.is_contiguous() else parameter.data.contiguous()
            self._store.broadcast(value, 0)               # so that random values are one rank's, not a patchwork
            if value.data_ptr() != parameter.data_ptr():
                parameter.data.copy_(value)
        kept = parameter.numel() <= self._threshold and self._kept + parameter.numel() <= self._config.zero.model_persistence_threshold
        if kept:
            self._kept += parameter.numel()
        owners.record(parameter, self._store, self._store.add(parameter, name, not kept))


class GatheredParameters:
    """Whole values of `params` inside, also for code below torch's operators (numpy, data_ptr).

    With `modifier_rank`, each rank may write its values in any way; at the end that rank's become everyone's, and the others' are
    dropped (collective). Without it, writes through torch's operators count as everywhere. Parameters that neither an engine nor
    zero.Init has are left alone.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self._by_store = {}
        self._modifier = None if modifier_rank is None else operator.index(modifier_rank)
        if not enabled:
            return
        for parameter in _tensors(params):
            owner = owners.find(parameter)
            if owner is not None:
                partitioned = owner.store.info(owner.id)["partitioned"]
                self._by_store.setdefault(owner.store, {})[owner.id] = (parameter, partitioned)
        for store in self._by_store:
            if self._modifier is not None and not 0 <= self._modifier < store.world_size:
                raise ValueError(f"[GatheredParameters] modifier_rank is {modifier_rank}; the parameters' ranks are 0 to "
                                 f"{store.world_size - 1}")

    def __enter__(self):
        for store, entries in self._by_store.items():
            ids = [id for id, (_, partitioned) in entries.items() if partitioned]
            if ids:
                store.pin(ids) if self._modifier is None else store.begin_edit(ids)
            count_inside([parameter for parameter, _ in entries.values()], 1)
        return self

    def __exit__(self, kind, error, trace):
        for store, entries in self._by_store.items():
            count_inside([parameter for parameter, _ in entries.values()], -1)
            ids = [id for id, (_, partitioned) in entries.items() if partitioned]
            if self._modifier is None:
                if ids:
                    store.unpin(ids)
                continue
            if ids:
                store.end_edit(ids, self._modifier)
            if store.world_size > 1:
                for parameter, partitioned in entries.values():
                    if not partitioned:
                        _broadcast_whole(store, parameter, self._modifier)
        return False


def _broadcast_whole(store, parameter, root):
    """One rank's value of a parameter that every rank holds whole."""
    with torch.no_grad():
        value = parameter.data.contiguous()
        before = None if store.rank == root else value.clone()
        store.broadcast(value, root)
        if before is not None and not torch.equal(before, value):
            parameter.copy_(value)


def _tensors(params):
    """A tensor, a list, a generator, a dict's values, a module's parameters, also nested: the tensors in it."""
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, torch.nn.Module):
        return list(params.parameters())
    if isinstance(params, dict):
        params = params.values()
    if params is None:
        return []
    return [t for item in params for t in _tensors(item)]


def whole(tensors):
    """Context: `tensors` are readable below torch's operators. Not collective."""
    return GatheredParameters(tensors)


@contextlib.contextmanager
def unwrap_model_for_generation(engine):
    """Context: the engine's module, its parameters whole, for code that generates with it. Not needed for generate() itself; saves it the
    fetching where the whole model fits."""
    with GatheredParameters(list(engine.module.parameters())):
        yield engine.module


def register_external_parameter(module, parameter):
    """Nothing to do: a parameter is made whole when an operator touches it, whichever module uses it."""
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise ValueError("[zero.register_external_parameter] needs a torch.nn.Module and a torch.nn.Parameter")


def unregister_external_parameter(module, parameter):
    """Nothing to do; see register_external_parameter."""
    register_external_parameter(module, parameter)
