"""--dry-run: what would be started, in words and commands."""
import shlex

from unshard.launcher.connect import node_argv
from unshard.launcher.job import share_lines
from unshard.launcher.node_plan import make_node_plan
from unshard.launcher.plan import HERE, MEET, SSH
from unshard.launcher.ports import DEFAULT_PORT
from unshard.launcher.tools import tool_argv


def describe(plan, options, device_count):
    if plan.way == HERE:
        return make_node_plan(plan.order(0, "dry-run"), device_count).describe()
    task = plan.task
    known = all(share.slots is not None for share in plan.shares)
    lines = [f"{len(plan.shares)} hosts, {f'{plan.world} ranks' if known else 'which will say how many ranks they have'}"]
    if known:
        plan.number()
        lines += share_lines(plan)
    found = "found when the hosts have answered" if plan.way == SSH else plan.shares[0].host
    lines.append(f"master {plan.master_addr or found}, port {plan.master_port or DEFAULT_PORT}")
    local_rank = ["--local_rank=N"] if task["pass_local_rank"] else []
    head = [] if task["no_python"] else ["python", "-u"] + ["-m"] * task["module"]
    lines.append(f"each rank: {shlex.join([*head, task['script'], *local_rank, *task['arguments']])}")
    lines += [f"env {key}={value}" for key, value in sorted(task["environment"].items())]
    return "\n".join(lines + commands(plan, options))


def commands(plan, options):
    """What this machine runs to start it all."""
    if plan.way == MEET:
        return [f"this machine is host {plan.node_rank}, {'where the others come to' if plan.node_rank == 0 else 'and goes to host 0'}"]
    if plan.way != SSH:
        argv, environment = tool_argv(plan, options)
        return ["command: " + " ".join([f"{name}={shlex.quote(value)}" for name, value in environment.items()] + [shlex.join(argv)])]
    return [f"command for {share.host}: {shlex.join(node_argv(plan, options, node)[0])}" for node, share in enumerate(plan.shares)]
