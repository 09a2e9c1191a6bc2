"""How node.py is started on a host."""
import os
import re
import shlex
import shutil
import sys

from unshard.launcher.errors import LaunchError
from unshard.launcher.link import ProcessLink
from unshard.launcher.plan import SSH

NEEDED_TO_START = ("PYTHONPATH", "LD_LIBRARY_PATH")          # the interpreter must find its modules before it can be told anything
NODE = "unshard.launcher.node"


def node_words(plan, node):
    """Arguments of node.py. The script and its arguments come over standard input; here they are for the reader of a list of processes, and
    words in which a shell would see more than a word are left out."""
    words = ["-m", NODE, f"--host={plan.shares[node].host}"]
    if node == 0 and plan.way == SSH:            # at a meeting the master port is the meeting's until all have come
        words += ["--master"] + ([f"--port={plan.master_port}"] if plan.master_port else [])
    shown = [word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "..." for word in [plan.task["script"], *plan.task["arguments"]]]
    return [*words, "--", *shown]


def remote_command(words, venv_script=None):
    """One line for a host's shell."""
    environment = [f"{name}={os.environ[name]}" for name in NEEDED_TO_START if os.environ.get(name)]
    command = shlex.join((["env", *environment] if environment else []) + ([] if venv_script else [sys.executable, *words]))
    if venv_script:
        inner = f". {shlex.quote(os.path.abspath(venv_script))} && exec {shlex.join([sys.executable, *words])}"
        command = f"{command} sh -c {shlex.quote(inner)}".strip()
    return f"exec {command}"                     # no shell stays in between: the end of the connection is the end of node.py's parent


def ssh_argv(options, host, remote, more=None):
    """`more`: words for ssh instead of --launcher_args."""
    more = shlex.split(options.launcher_args) if more is None else more
    port = ["-p", str(options.ssh_port)] if options.ssh_port else []
    # BatchMode: no question that nobody can answer. ServerAlive: a host that lost its network is given up after 20 s.
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(options.connect_timeout / 2))}", "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3", *port, *more, "--", host, remote]


def node_argv(plan, options, node):
    """(argv, what it is) that starts node.py on host number `node`."""
    host = plan.shares[node].host
    if host in plan.local:
        return [sys.executable, *node_words(plan, node)], "python"
    return ssh_argv(options, host, remote_command(node_words(plan, node), options.venv_script)), "ssh"


def connect_by_ssh(plan, options):
    """A link to every host; nothing has answered yet."""
    if len(plan.local) < len(plan.shares) and shutil.which("ssh") is None:
        raise LaunchError("other hosts are reached by ssh, and there is no ssh here; or give the command on each host, with --no_ssh")
    links = []
    try:
        for node, share in enumerate(plan.shares):
            argv, what = node_argv(plan, options, node)
            links.append(ProcessLink(share.host, argv, what))
    except BaseException:
        for link in links:
            link.close()
        raise
    return links
