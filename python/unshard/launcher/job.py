"""Runs a plan to its end: its attempts, one after the other, and the exit code."""
import dataclasses
import signal
import uuid

from unshard.launcher import meeting, preflight
from unshard.launcher.connect import connect_by_ssh
from unshard.launcher.errors import LaunchError
from unshard.launcher.hub import Hub, Interrupted
from unshard.launcher.plan import HERE, MEET
from unshard.launcher.report import Report, ranges


def run(plan, options, voice, device_count):
    attempt = 0
    while True:
        try:
            if plan.way == HERE:
                code, again = attempt_here(plan, voice, attempt, device_count)
            else:
                code, again = attempt_on_hosts(dataclasses.replace(plan), options, voice, attempt)
        except Interrupted as interrupted:
            voice.say(f"{interrupted}: no ranks had been started")
            return 128 + interrupted.number
        if not again:
            return code or voice.outlet.code()
        attempt += 1
        voice.say(f"starting all ranks again: restart {attempt} of {plan.max_restarts}")


def attempt_here(plan, voice, attempt, device_count):
    """(exit code, is there to be another attempt) of the ranks of this machine, with the agent in this process."""
    from unshard.launcher.agent import launch
    from unshard.launcher.node_plan import make_node_plan

    node = make_node_plan(plan.order(0, uuid.uuid4().hex, attempt), device_count)
    report = Report(node.world, node.prefixed, outlet=voice.outlet)

    def port_taken(port):
        voice.say(f"port {plan.master_port} was taken by another program meanwhile: using {port}")

    ended = launch(node, report, both_streams=node.prefixed,         # a single rank has the terminal
                   port_taken=None if plan.port_asked else port_taken)
    if ended.signal is not None:
        report.printer.close()
        voice.say(f"{signal.Signals(ended.signal).name}: all ranks were ended")
        return 128 + ended.signal, False
    code = report.conclude(ended.codes)
    return code, code != 0 and attempt < plan.max_restarts and not report.reader_gone


def attempt_on_hosts(plan, options, voice, attempt):
    if plan.way == MEET:
        if plan.node_rank > 0:
            return meeting.take_part(plan, voice)
        links = meeting.links_of_meeting(plan, voice)
    else:
        links = connect_by_ssh(plan, options)
    with Hub(links, voice.outlet) as hub:
        try:
            hub.hellos(options.connect_timeout)
            if hub.silent:
                voice.warn(f"{', '.join(hub.silent)} answered nothing that can be read, and ended well: whether ranks ran there isn't "
                           "known")
                return 0, False
            preflight.check(hub.answers, options.no_ssh_check, voice.warn)
            preflight.settle_meeting_point(plan, hub.answers, voice.warn)
            announce(plan, voice.say)
            return conduct(hub, plan, voice, attempt)
        except LaunchError as error:             # the hosts of a meeting are to know why
            hub.finish(2, False, str(error))
            raise
        except Interrupted as interrupted:
            hub.finish(128 + interrupted.number, False, f"{interrupted}: no ranks had been started")
            raise


def conduct(hub, plan, voice, attempt):
    run_id = uuid.uuid4().hex
    report = Report(plan.world, plan.world > 1 and not plan.task["no_prefix"], host_finder(plan), voice.outlet)
    hub.start({share.host: plan.order(node, run_id, attempt) for node, share in enumerate(plan.shares)}, report)
    if hub.interrupted:
        report.printer.close()
        whose = f"all ranks but those of {', '.join(hub.lost)}" if hub.lost else "all ranks"
        words, code, again = f"{signal.Signals(hub.interrupted).name}: {whose} were ended", 128 + hub.interrupted, False
        voice.say(words)
        report.tell_lost(hub.lost)
    elif hub.refusals and not report.any_failure:
        report.tell_lost(hub.lost)
        raise LaunchError(hub.why_refused())
    else:
        code = report.conclude(hub.codes, hub.lost)
        words, again = report.headline, code != 0 and attempt < plan.max_restarts and not report.reader_gone
    hub.finish(code, again, words)
    return code, again


def host_finder(plan):
    owners = [share.host for share in plan.shares for _ in share.slots]
    return lambda rank: owners[rank] if 0 <= rank < len(owners) else "no host"


def announce(plan, say):
    say(f"{count(plan.world, 'rank')} on {count(len(plan.shares), 'host')}, rank 0 at {plan.master_addr}:{plan.master_port}")
    for line in share_lines(plan):
        say(line)


def count(number, what):
    return f"{number} {what}{'s' * (number != 1)}"


def share_lines(plan):
    for share in plan.shares:
        last = share.first_rank + len(share.slots) - 1
        ranks = f"rank {share.first_rank}" if last == share.first_rank else f"ranks {share.first_rank}-{last}"
        yield f"  {share.host}: {ranks} on slot{'s' * (len(share.slots) > 1)} {ranges(share.slots)}"
