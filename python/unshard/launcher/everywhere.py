"""Run one command on every host of a hostfile, each by ssh, all at once, each line of output with its host in front."""
import argparse
import concurrent.futures
import shlex
import subprocess
import sys

from unshard.launcher.errors import LaunchError
from unshard.launcher.hosts import read_hostfile
from unshard.launcher.options import HOSTFILE

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30")          # no question that nobody can answer


def main(argv=None, prog="ds_ssh"):
    """Returns the first status other than 0, in the order of the hostfile. Without a hostfile the command runs here."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("-f", "--hostfile", default=HOSTFILE, help=f"lines 'name slots=N' (default: {HOSTFILE})")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    options = parser.parse_args(argv)
    if not options.command:
        parser.error("a command is needed")
    try:
        hosts = read_hostfile(options.hostfile)
    except LaunchError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    if hosts is None:
        print(f"{prog}: there is no hostfile {options.hostfile}: running the command on this machine", file=sys.stderr)
        return subprocess.run(options.command, check=False).returncode
    line = options.command[0] if len(options.command) == 1 else shlex.join(options.command)
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        codes = list(pool.map(lambda host: _run([*_SSH, host, line], host), hosts))
    return next((code for code in codes if code), 0)


def _run(words, host):
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace") as process:
        for text in process.stdout:
            sys.stdout.write(f"{host}: {text}" if text.endswith("\n") else f"{host}: {text}\n")
            sys.stdout.flush()
    return process.returncode
