"""The command that a rank becomes. Decided on the rank's own host, where its files are."""
import os
import shutil
import sys

from unshard.launcher.errors import LaunchError


def rank_command(script, arguments, module=False, no_python=False, path=None):
    """(argv without --local_rank, where the script's arguments begin). `path`: the ranks' PATH, where it isn't this process's."""
    if no_python:
        if shutil.which(script, path=path) is None:
            raise LaunchError(f"there is no program '{script}' that can be run")
        head = [script]
    elif module:
        head = [sys.executable, "-u", "-m", script]
    elif not os.path.exists(script):
        raise LaunchError(f"there is no script '{script}' in {os.getcwd()}")
    elif is_binary(script):
        head = [os.path.join(".", script)]
    else:
        head = [sys.executable, "-u", script]
    return head + list(arguments), len(head)


def is_binary(path):
    """A compiled program needs no --no_python: Python couldn't read it anyway."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"
