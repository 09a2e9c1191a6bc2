"""At the end of a run rank 0 merges what all ranks wrote, where the files are on one file system."""
import pathlib
import time

from unshard.timeline.merge import write_outputs

_PATIENCE_S = 10                  # for the other ranks to close their files
_MOST_BYTES = 100e6               # more is merged on demand only: it takes longer than anybody wants to wait at the end of a run
_CLOSED = b'"closed": true}}'      # the end of a file to which nothing will be added


def finish(folder, world_size, engine, say):
    """Rank 0, after its own file is closed. `say`: shows a line to the user. Never raises: a run doesn't fail over its timeline."""
    folder, suffix = pathlib.Path(folder), f".{engine}" if engine else ""
    files = [folder / f"timeline.rank{rank}{suffix}.json" for rank in range(world_size)]
    by_hand = f"`unshard timeline {folder}` makes one trace and one page of it"
    try:
        missing = [rank for rank, file in enumerate(files) if not file.is_file()]
        if missing:
            say(f"timeline: the files of rank {', '.join(map(str, missing))} aren't in {folder} on this host; with all of them there "
                f"{by_hand}")
        elif sum(file.stat().st_size for file in files) > _MOST_BYTES:
            say(f"timeline: {folder} holds much; {by_hand}")
        else:
            unfinished = _wait(files)
            left_out = []
            written = write_outputs(folder, engine, left_out)
            for problem in left_out:
                say(f"timeline: left out: {problem}")
            if unfinished:
                say(f"timeline: the files of rank {', '.join(map(str, unfinished))} weren't ended (still running, killed, or no room to "
                    "write): what was in them is shown")
            say("timeline: " + ", ".join(map(str, written)))
    except Exception as error:                    # a file that another program wrote can be wrong in any way
        say(f"timeline: not merged: {str(error) or repr(error)}; {by_hand}")


def _wait(files):
    """For all to be ended; the ranks whose files weren't in time."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        unfinished = [rank for rank, file in enumerate(files) if not _is_closed(file)]
        if not unfinished or time.monotonic() > deadline:
            return unfinished
        time.sleep(0.02)


def _is_closed(file):
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - 64))
        return stream.read(64).rstrip().endswith(_CLOSED)
