"""pdsh, slurm's srun and Open MPI's mpirun: each starts one process a host, which takes part in a meeting."""
import base64
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib

from unshard.launcher import orphans
from unshard.launcher.connect import remote_command
from unshard.launcher.errors import LaunchError
from unshard.launcher.plan import MEET, Plan, Share
from unshard.launcher.ports import DEFAULT_PORT
from unshard.launcher.signals import signals_to, terminate_with_parent

PROGRAMS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}
END_S = 5.0              # between a signal for the tool and SIGKILL
TASK = "unshard.launcher.tool_task"


def encode(plan):
    """The plan as one word in which no shell sees anything but a word."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(dataclasses.asdict(plan)).encode())).decode()


def decode(word):
    fields = json.loads(zlib.decompress(base64.urlsafe_b64decode(word)))
    fields["shares"] = [Share(**share) for share in fields["shares"]]
    return Plan(**fields)


def tool_argv(plan, options):
    """(argv of the tool, what to add to its environment)"""
    hosts = [share.host for share in plan.shares]
    meeting = dataclasses.replace(plan, way=MEET, master_addr=plan.master_addr or hosts[0], master_port=plan.master_port or DEFAULT_PORT,
                                  local=[], notes=[])
    words = ["-m", TASK, encode(meeting)]
    more, environment = shlex.split(options.launcher_args), {}
    cwd = plan.task["cwd"]
    if options.launcher == "pdsh":
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if options.ssh_port:
            environment["PDSH_SSH_ARGS_APPEND"] = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} -p {options.ssh_port}".strip()
        remote = remote_command([*words, "--node_rank=HOST_NUMBER", "--lease"], options.venv_script)
        remote = remote.replace("%", "%%").replace("HOST_NUMBER", "%n")        # by which pdsh means the host's number
        return ["pdsh", "-S", "-f", "1024", "-w", ",".join(hosts), *more, remote], environment
    program = ["sh", "-c", remote_command(words, options.venv_script)] if options.venv_script else [sys.executable, *words]
    if options.launcher == "slurm":
        return ["srun", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}",
                "--kill-on-bad-exit=1", "--export=ALL", f"--chdir={cwd}", *more, *program], environment
    slots = ",".join(f"{host}:1" for host in hosts)
    return ["mpirun", "-n", str(len(hosts)), "--map-by", "ppr:1:node", "--bind-to", "none", "--host", slots, "--wdir", cwd, *more,
            *program], environment


# When the launcher is killed this ends the tool. pdsh leaves its ssh processes then, but closes their input: see tool_task's lease.
GUARD = ("sh", "-c", """"$@" & tool=$!
trap 'kill $tool' TERM
while wait $tool; code=$?; kill -0 $tool 2>/dev/null; do :; done
exit $code""", "sh")


def run_tool(plan, options, voice):
    argv, environment = tool_argv(plan, options)
    if shutil.which(argv[0]) is None:
        raise LaunchError(f"--launcher={options.launcher} needs the program {argv[0]}, which isn't here; leave --launcher out to use ssh")
    before = orphans.adopt()
    process = subprocess.Popen([*GUARD, *argv], stdin=subprocess.DEVNULL, env={**os.environ, **environment}, start_new_session=True,
                               preexec_fn=terminate_with_parent)
    received = []

    def pass_on(number, _):
        received.append(number)
        process.terminate()                      # srun and mpirun end everything at that; they want SIGINT twice

    with signals_to(pass_on):
        code = wait_for(process, received)
        wait_for_orphans(before)
    if received:
        voice.say(f"{signal.Signals(received[0]).name}: all ranks were ended")
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def wait_for(process, received):
    """Its exit code. Once a signal has been passed on it is given END_S, then killed."""
    end = None
    while True:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            end = end or (time.monotonic() + END_S if received else None)
            if end and time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_orphans(before):
    """pdsh's ssh processes end with the ranks of their hosts, and are given END_S for it."""
    end = time.monotonic() + END_S
    while time.monotonic() < end and orphans.children() - before:
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        time.sleep(0.02)
    orphans.end_all_but(before)
