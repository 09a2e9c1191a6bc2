"""The command itself: options, plan, launch, exit code."""
import contextlib
import os
import sys
import tempfile

from unshard.launcher.errors import LaunchError
from unshard.launcher.options import build_parser
from unshard.launcher.plan import make_plan


def device_count():
    """GPUs that this process may use."""
    import torch

    return torch.cuda.device_count()


def run_command(argv, prog):
    options = build_parser(prog).parse_args(argv)

    def say(text):
        if not options.quiet and options.log_level in ("debug", "info"):
            print(f"[unshard run] {text}", file=sys.stderr, flush=True)

    try:
        plan = make_plan(options, device_count)
        if options.dry_run:
            print(plan.describe())
            return 0
        for note in plan.notes:
            say(note)
        from unshard.launcher.agent import launch

        with saved_pid() if options.save_pid else contextlib.nullcontext():
            return launch(plan, say, options.log_level)
    except LaunchError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def saved_pid():
    path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}.ds")
    with open(path, "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        os.unlink(path)
