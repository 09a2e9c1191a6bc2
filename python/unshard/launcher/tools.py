"""pdsh, slurm's srun and Open MPI's mpirun: each starts one process a host, which takes part in a meeting."""
import base64
import dataclasses
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib

from unshard.launcher import orphans
from unshard.launcher.connect import remote_command, ssh_argv
from unshard.launcher.env_file import OF_THIS_HOST, SET_BY_LAUNCHER
from unshard.launcher.errors import LaunchError
from unshard.launcher.plan import MEET, Plan, Share
from unshard.launcher.ports import DEFAULT_PORT
from unshard.launcher.signals import signals_to, terminate_with_parent

PROGRAMS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}
END_S = 5.0              # between a signal for the tool and SIGKILL
TASK = "unshard.launcher.tool_task"
TASK_VARIABLE = "UNSHARD_TOOL_TASK"          # the plan, for tool_task; by pdsh's way it comes over standard input
SSH_VARIABLE = "UNSHARD_TOOL_SSH"            # argv of ssh, for pdsh_ssh


def encode(plan):
    """The plan as one word."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(dataclasses.asdict(plan)).encode())).decode()


def decode(word):
    fields = json.loads(zlib.decompress(base64.urlsafe_b64decode(word)))
    fields["shares"] = [Share(**share) for share in fields["shares"]]
    return Plan(**fields)


def meeting_of(plan):
    """The plan that the tool's processes carry out, with a secret by which they know each other."""
    return dataclasses.replace(plan, way=MEET, master_addr=plan.master_addr or plan.shares[0].host, local=[], notes=[], by_tool=True,
                               master_port=plan.master_port or DEFAULT_PORT, secret=secrets.token_hex(16))


def tool_environment(plan, options):
    """What the tool's processes are to read. It holds secrets (what a job's environment file says, the meeting's own), so it isn't on any
    command line, where `ps` shows it to everyone."""
    environment = {TASK_VARIABLE: encode(meeting_of(plan))}
    if options.launcher == "pdsh":
        more = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
        remote = remote_command(["-m", TASK, "--node_rank=HOST_NUMBER", "--lease"], options.venv_script)
        environment[SSH_VARIABLE] = json.dumps(ssh_argv(options, "HOST", remote, more))
    return environment


def tool_argv(plan, options):
    """(argv of the tool, what to add to its environment beside tool_environment)"""
    hosts = [share.host for share in plan.shares]
    words = ["-m", TASK]
    more = shlex.split(options.launcher_args)
    cwd = plan.task["cwd"]
    if options.launcher == "pdsh":               # which can't hand anything to what it starts by ssh; so our own process does, one a host
        each = [sys.executable.replace("%", "%%"), "-m", "unshard.launcher.pdsh_ssh", "%h", "%n", "%u"]
        return ["pdsh", "-S", "-f", "1024", "-w", ",".join(hosts), *more, *each], {"PDSH_RCMD_TYPE": "exec"}
    program = ["sh", "-c", remote_command(words, options.venv_script)] if options.venv_script else [sys.executable, *words]
    if options.launcher == "slurm":
        return ["srun", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}",
                "--kill-on-bad-exit=1", "--export=ALL", f"--chdir={cwd}", *more, *program], {}
    slots = ",".join(f"{host}:1" for host in hosts)
    return ["mpirun", "-n", str(len(hosts)), "--map-by", "ppr:1:node", "--bind-to", "none", "--host", slots, "--wdir", cwd,
            "-x", TASK_VARIABLE, *more, *program], {}


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
    own = {name: value for name, value in os.environ.items() if name not in SET_BY_LAUNCHER | OF_THIS_HOST}       # srun forwards it all
    process = subprocess.Popen([*GUARD, *argv], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=terminate_with_parent,
                               env={**own, **environment, **tool_environment(plan, options)})
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
