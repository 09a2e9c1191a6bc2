"""What must hold before ranks are started: asked of all hosts, decided here. Only a definite mismatch stops; what can't be read is said."""
import unshard
from unshard.launcher.errors import LaunchError
from unshard.launcher.hello import PROTOCOL
from unshard.launcher.ports import DEFAULT_PORT, settle_port


def check(answers, lenient, warn):
    """`answers`: {host: hello}. `lenient`: mismatches are warnings too."""
    def mismatch(text):
        if not lenient:
            raise LaunchError(f"{text} (--no_ssh_check starts all the same)")
        warn(text)

    for host, answer in answers.items():
        if answer.get("protocol") != PROTOCOL:
            raise LaunchError(f"{host} has unshard {answer.get('unshard')}, whose launcher speaks otherwise; install the same version")
        if answer["unshard"] != unshard.__version__:
            mismatch(f"{host} has unshard {answer['unshard']}, this machine has {unshard.__version__}")
    by_torch = {}
    for host, answer in answers.items():
        if answer["torch"] is None:
            warn(f"{host} doesn't say which torch it has")
        else:
            by_torch.setdefault(answer["torch"], []).append(host)
    releases = {version.partition("+")[0] for version in by_torch}
    words = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in by_torch.items())
    if len(releases) > 1:
        mismatch(f"the hosts have different versions of torch: {words}")
    elif len(by_torch) > 1:
        warn(f"the hosts have different builds of torch: {words}")
    pythons = {answer["python"].rpartition(".")[0] for answer in answers.values()}
    if len(pythons) > 1:
        warn("the hosts have different versions of Python: " + "; ".join(f"{a['python']} on {host}" for host, a in answers.items()))
    machines = {}
    for host, answer in answers.items():
        machines.setdefault(answer["machine"], []).append(host)
    for names in machines.values():
        if len(names) > 1:
            warn(f"{' and '.join(names)} are one machine: its ranks will share its devices")


def settle_meeting_point(plan, answers, warn):
    """Fill in the plan's address and port of rank 0."""
    first = plan.shares[0].host
    answer = answers.get(first, {})
    notes = []
    plan.master_port = settle_port(plan.master_port, answer.get("port") or plan.master_port or DEFAULT_PORT, notes)
    for note in notes:
        warn(f"{first}: {note}")
    plan.master_addr = plan.master_addr or seen_address(plan, first, answers) or first


def seen_address(plan, first, answers):
    """The address at which another host was seen to reach the first one (or to be reached from it), over ssh."""
    if len(plan.shares) == 1:
        return "127.0.0.1"
    if first in plan.local:
        addresses = [answers[share.host].get("launcher_address") for share in plan.shares[1:] if share.host in answers]
    else:
        addresses = [answers.get(first, {}).get("address")]
    return next((address for address in addresses if address and not address.startswith("127.") and address != "::1"), None)
