"""Which store and which engine a parameter belongs to: a side table, so that nothing is hung on the user's tensors.

An entry keeps its store alive for as long as the parameter lives (a model built under zero.Init, or whose engine has gone, still works),
and the store its parameters: what nobody else has any more is let go by let_go_of_abandoned().
"""
import atexit
import gc
import os
import sys
import weakref
from typing import NamedTuple

from torch.utils.weak import WeakTensorKeyDictionary

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
    """Drop the stores whose engine has gone without destroy(), and whose parameters nobody has any more. Called where engines are made, by
    all ranks: in other memory than shared a store's end is the end of this rank's answers to its peers."""
    if not _entries:
        return
    gc.collect()                                          # an engine and its optimizer know each other
    kept, left = set(), {}
    for reference, (store, _, engine) in list(_entries.data.items()):
        parameter = reference()
        if parameter is None:
            continue
        # What counts here, and nothing else: `parameter`, getrefcount's argument and torch's own, and for torch the store and Python.
        alone = sys.getrefcount(parameter) == 3 and parameter._use_count() == 2
        if alone and (engine is None or engine() is None):
            left.setdefault(store, []).append(reference)
        else:
            kept.add(store)
    for store, references in left.items():
        if store not in kept:
            for reference in references:
                _entries.data.pop(reference, None)


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
