"""What pdsh starts here for each host: `python -m unshard.launcher.pdsh_ssh HOST NUMBER USER`, which runs ssh to it.

pdsh's own ssh gives what it starts no environment and no input, only a command line, which everyone can read. Here the plan goes over
ssh's standard input. That stays open as the lease on the host's ranks: it ends with this process, and with pdsh, which holds ours.
"""
import getpass
import json
import os
import subprocess
import sys
import threading

from unshard.launcher.tools import SSH_VARIABLE, TASK_VARIABLE


def main():
    host, number, user = sys.argv[1:]
    plan = os.environ.pop(TASK_VARIABLE)
    *argv, dashes, _, remote = json.loads(os.environ.pop(SSH_VARIABLE))
    login = ["-l", user] if user != getpass.getuser() else []
    process = subprocess.Popen([*argv, *login, dashes, host, remote.replace("HOST_NUMBER", number)], stdin=subprocess.PIPE)
    try:
        process.stdin.write(plan.encode() + b"\n")
        process.stdin.flush()
    except OSError:
        pass                                     # ssh says why
    threading.Thread(target=end_with_input, args=[process], daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def end_with_input(process):
    while os.read(0, 4096):
        pass
    try:
        process.stdin.close()
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
