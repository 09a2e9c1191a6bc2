"""The command itself: options, plan, launch, exit code."""
import contextlib
import os
import tempfile

from unshard.launcher.devices import device_count
from unshard.launcher.errors import LaunchError
from unshard.launcher.guard import guarded
from unshard.launcher.options import TOOLS, build_parser
from unshard.launcher.outlet import Outlet
from unshard.launcher.plan import HERE, make_plan
from unshard.streams import complain


class Voice:
    """The launcher's own lines; `outlet` is where those and the ranks' go."""

    def __init__(self, options, prog):
        self.prog, self.outlet = prog, Outlet()
        self._talks = not options.quiet and options.log_level in ("debug", "info")
        self._warns = not options.quiet and options.log_level not in ("error", "critical")

    def say(self, text):
        if self._talks:
            self.outlet.say(text)

    def warn(self, text):
        if self._warns:
            self.outlet.say(f"warning: {text}")

    def error(self, text):
        complain(f"{self.prog}: error: {text}")


def run_command(argv, prog):
    options = build_parser(prog).parse_args(argv)
    voice = Voice(options, prog)
    try:
        plan = make_plan(options, device_count)
        for note in plan.notes:
            voice.say(note)
        if options.dry_run:
            from unshard.launcher.describe import describe

            print(describe(plan, options, device_count))
            return 0
    except LaunchError as error:
        voice.error(error)
        return 2
    if plan.way == HERE:
        return guarded(lambda: carry_out(plan, options, device_count, prog))
    return carry_out(plan, options, device_count, prog)


def carry_out(plan, options, device_count, prog):
    voice = Voice(options, prog)
    try:
        with saved_pid() if options.save_pid else contextlib.nullcontext():
            if plan.way in TOOLS:
                from unshard.launcher.tools import run_tool

                return run_tool(plan, options, voice)
            from unshard.launcher.job import run

            return run(plan, options, voice, device_count)
    except LaunchError as error:
        voice.error(error)
        return 2
    except KeyboardInterrupt:
        return 130


@contextlib.contextmanager
def saved_pid():
    path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}.ds")
    with open(path, "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        os.unlink(path)
