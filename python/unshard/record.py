"""This process's record of its run, for `unshard doctor`: what C++ knows of the collectives, and where Python is."""
import atexit
import functools
import json
import linecache
import os
import platform
import socket
import sys
import threading
import traceback

from unshard.core import ConfigError, _core
from unshard.folders import why_unusable

_FRAMES = 60
_crashed = []              # frames of the exception that ends the process, innermost last


@functools.cache
def of_this_process():
    """The record that all communicators of this process tell, or None where UNSHARD_RECORD=off."""
    from unshard.distributed import world_from_environment
    rank, world = _rank_and_world(world_from_environment)
    record = _core.start_record(rank, world, os.environ.get("UNSHARD_HOST") or socket.gethostname(), "", _versions(), _position)
    if record is not None:
        atexit.register(record.end)
        _write_on_exceptions(record)
    return record


def into(record, folder):
    """It writes there, unless it does somewhere already. Raises ConfigError where that can't be: else nobody hears of it until there is
    something to tell, nor then."""
    if folder and not record.directory:
        record.set_directory(folder)
    if record.directory and (why := _why_unusable(record.directory)):
        raise ConfigError(f"[config] unshard.run_dir = '{record.directory}' (UNSHARD_RUN_DIR, --run-dir): {why}")


@functools.cache
def _why_unusable(folder):
    return why_unusable(folder)


def _rank_and_world(from_environment):
    import torch.distributed as dist
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return from_environment()[:2]


def _versions():
    import torch

    import unshard
    return {"unshard": unshard.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _write_on_exceptions(record):
    before = sys.excepthook

    def hook(kind, value, trace):
        _crashed[:] = [_frame(frame, line) for frame, line in traceback.walk_tb(trace)][-_FRAMES:]
        text = "".join(traceback.format_exception_only(kind, value)).strip()
        if hasattr(sys, "ps1"):                                  # an interactive session goes on
            record.write("exception", text)
        else:
            record.raises(text)
        before(kind, value, trace)

    sys.excepthook = hook


def _position():
    """JSON: where the main thread is, or was when it raised. Called by the record on another thread."""
    if _crashed:
        return json.dumps({"from": "exception", "frames": _crashed})
    frame = sys._current_frames().get(threading.main_thread().ident)
    frames = [_frame(f, line) for f, line in traceback.walk_stack(frame)][:_FRAMES] if frame is not None else []
    return json.dumps({"from": "interpreter", "frames": frames[::-1]})


def _frame(frame, line):
    code = frame.f_code
    return {"file": os.path.abspath(code.co_filename) if not code.co_filename.startswith("<") else code.co_filename, "line": line,
            "function": code.co_name,
            "module": str(frame.f_globals.get("__name__", "")), "code": linecache.getline(code.co_filename, line, frame.f_globals).strip()}
