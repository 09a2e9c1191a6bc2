"""Which store and which engine a parameter belongs to: a side table, so that nothing is hung on the user's tensors.

An entry keeps its store alive for as long as the parameter lives (a model built under zero.Init, or whose engine has gone, still works),
and the store its parameters: what nobody else has any more is let go by let_go_of_abandoned().
"""
import atexit
import collections
import gc
import os
import sys
import weakref
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from unshard import leaving  # noqa: F401  at exit its turn is after close()'s
from unshard.core import _core


class Owner(NamedTuple):
    store: object          # _core.ParameterStore
    id: int                # in that store
    engine: object         # unshard.Engine, or None when only zero.Init has seen the parameter


_entries = WeakTensorKeyDictionary()       # parameter -> (store, id, weak reference to the engine or None)
_engines = weakref.WeakSet()
_recordings = {}                           # (folder, engine's name) -> ranks: what rank 0 has to put together, also when the engine is gone


def record(parameter, store, id, engine=None):
    _entries[parameter] = (store, id, weakref.ref(engine) if engine is not None else None)


def record_engine(engine):
    _engines.add(engine)


def forget(parameters, engine=None):
    for parameter in parameters:
        _entries.pop(parameter, None)
    if engine is not None:
        _engines.discard(engine)


def engines():
    return list(_engines)


def let_go_of_abandoned():
    """Drop the stores whose engine has gone without destroy(), and whose parameters nobody has any more. Called where engines are made,
    when all ranks have come there: in other memory than shared a store's end is the end of this rank's answers to its peers."""
    if not _entries:
        return
    gc.collect()                                          # an engine and its optimizer know each other
    kept, left, unknown = set(), {}, _counts_of_one_that_only_torch_has()
    for reference, (store, id, engine) in list(_entries.data.items()):
        parameter = reference()
        if parameter is None:
            continue
        has_engine = engine is not None and engine() is not None
        if has_engine or (sys.getrefcount(parameter), parameter._use_count()) != unknown:
            kept.add(store)
        else:
            left.setdefault(store, {})[reference] = id
    for store, references in left.items():
        if store not in kept and not _has_views(store, references):
            for reference in references:
                _entries.data.pop(reference, None)


def _counts_of_one_that_only_torch_has():
    """(Python's count, torch's) of a parameter that one holder in torch has, here the graph, and a variable, from where it is asked. What
    is counted changes from one Python and torch to the next."""
    with torch.enable_grad(), torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.empty(0))
        holder = parameter.view_as(parameter).grad_fn     # noqa: F841
    return sys.getrefcount(parameter), parameter._use_count()


def _has_views(store, references):
    """Whether some tensor (of a state_dict, say) lies in the memory of the store's partitioned parameters, which ends with the store."""
    storages = collections.Counter(reference().untyped_storage()._cdata for reference, id in references.items()
                                   if store.info(id)["partitioned"])
    return any(torch._C._storage_Use_Count(storage) > parameters + 2 for storage, parameters in storages.items())   # the store, Python


def record_timeline(folder, name, world_size):
    """Rank 0 puts it together when the engine ends, or at exit. Returns what finish_timeline() takes."""
    recording = (os.path.abspath(folder), name)
    _recordings[recording] = world_size
    return recording


def finish_timeline(recording):
    """After the file of this rank was closed; the second time nothing."""
    world_size = _recordings.pop(recording, None)
    if world_size is not None:
        from unshard.timeline.finish import finish
        finish(recording[0], world_size, recording[1], _core.log_info)


@atexit.register
def close():
    """At exit, while Python still runs: let go of every engine and store, and with them of the process group, whose threads may hold
    Python's tensors (dropped later they would abort the process). Not after an exception: an operation that a peer never joined may be
    in the way, and the process must end."""
    for engine in engines():
        if engine._core is not None:
            engine._core.close_timeline()
            engine._core.wait_for_files()             # of a save in the background, also when the script failed after it
    if hasattr(sys, "last_value"):
        return
    for engine in _engines:
        engine._core = engine._store = None
    _entries.clear()
    for recording in list(_recordings):
        finish_timeline(recording)


def find(tensor):
    """Owner of a parameter (views and new objects over its storage too), or None."""
    entry = _entries.get(tensor)
    if entry is not None:
        store, id, engine = entry
        return Owner(store, id, engine() if engine is not None else None)
    found = _core.store_of(tensor)
    if found is None:
        return None
    store, id = found
    return Owner(store, id, next((e for e in _engines if e._store == store), None))
