"""torch.distributed for the engine: started when needed, and the engine's Communicator over its default group."""
import atexit
import datetime
import functools
import itertools
import os
import sys

import torch
import torch.distributed as dist

from unshard import leaving, meeting
from unshard.core import _core

leaving.group_defaults_without_a_group(dist)

# What launchers call rank, world size and local rank, in the order of preference.
_LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
              ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))

# Communicators are made by all ranks in the same order; the number keeps their keys in the store apart.
_numbers = itertools.count()


def world_from_environment(environ=os.environ):
    """(rank, world_size, local_rank) that a launcher set, or (0, 1, 0). Raises ValueError for half of a pair or a malformed number."""
    for rank, size, local in _LAUNCHERS:
        if rank not in environ and size not in environ:
            continue
        if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in environ:
            continue                                       # inside an allocation, but not started by srun
        missing = [name for name in (rank, size) if name not in environ]
        if missing:
            raise ValueError(f"[distributed] {missing[0]} isn't set, but {rank if missing[0] == size else size} is; set both or neither")
        values = {name: _number(environ, name) for name in (rank, size, local) if name in environ}
        if not 0 <= values[rank] < values[size]:
            raise ValueError(f"[distributed] {rank}={values[rank]} isn't a rank of {size}={values[size]}")
        return values[rank], values[size], values.get(local, 0)
    return 0, 1, _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else 0


def _number(environ, name):
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"[distributed] {name}='{environ[name]}' isn't a whole number") from None


def device_of_this_rank():
    """The accelerator of this rank's number on its host, else the CPU (DS_ACCELERATOR=cpu asks for it)."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = world_from_environment()[2] % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def default_backend():
    return "gloo" if device_of_this_rank().type == "cpu" else "cuda:nccl,cpu:gloo"


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True, timeout=None, init_method=None,
                     dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Start torch.distributed unless it runs: from the launcher's variables, or as a world of one without any. Returns None.

    Raises CommError when the address or the port can't be used, ValueError for missing or malformed variables.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ValueError("[distributed] dist_init_required=False, but torch.distributed isn't initialised")
    if rank < 0 or world_size < 0:
        rank, world_size, _ = world_from_environment()
    backend = dist_backend or default_backend()
    if device_of_this_rank().type == "cpu" and backend == "nccl":
        raise ValueError("[distributed] backend 'nccl' needs a GPU, and this rank has none; use 'gloo'")
    if timeout is None and "DEEPSPEED_TIMEOUT" in os.environ:
        timeout = datetime.timedelta(minutes=_number(os.environ, "DEEPSPEED_TIMEOUT"))
    keywords = {} if timeout is None else {"timeout": timeout}

    def start(store):
        device_of_this_rank()                              # the current device is a thread's
        if interface := _core.interface_for_gloo():        # torch would take a loopback address where this host's name means one
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **keywords)

    if world_size == 1 and init_method is None:
        start(dist.HashStore())
    else:
        address = None if init_method else _address(distributed_port)
        meeting.meet(start, init_method, address, rank, world_size, timeout or dist.default_pg_timeout)
    _leave_at_exit()


@functools.cache
def _leave_at_exit():
    atexit.register(_leave)


def _leave():
    """At exit; see owners.close()."""
    if dist.is_initialized() and dist.get_backend() == "gloo" and not hasattr(sys, "last_value"):
        from unshard import owners
        owners.close()
        dist.destroy_process_group()


def _address(port):
    if "MASTER_ADDR" not in os.environ:
        raise ValueError("[distributed] MASTER_ADDR isn't set: the ranks need the address of rank 0's host (MASTER_PORT too)")
    return os.environ["MASTER_ADDR"], _number(os.environ, "MASTER_PORT") if "MASTER_PORT" in os.environ else port


def make_communicator(settings=None):
    """The engine's Communicator over torch.distributed's default group; collective. `settings`: Config.unshard."""
    settings = _core.Config.from_json("{}").unshard if settings is None else settings
    number = next(_numbers)
    _leave_at_exit()
    told = _record(settings)
    if dist.get_world_size() == 1:
        return _core.single_process_communicator(settings.timeout_s, **told)
    from torch.distributed import distributed_c10d
    store = dist.PrefixStore(f"unshard/{number}", distributed_c10d._get_default_store())
    return _core.make_communicator(dist.group.WORLD, store, settings.share_memory, settings.timeout_s, settings.collective_check_s,
                                   **({"host": settings.host} if getattr(settings, "host", "") else {}), **told)


def _record(settings):
    """{"record": this process's}, where there is one."""
    from unshard import record
    mine = record.of_this_process()
    if mine is None:
        return {}
    record.into(mine, settings.run_dir)
    return {"record": mine}
