"""How launchers of several hosts meet: frames, pre-flight, the meeting, what they tell each other."""
import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import unshard
from launching import environment, free_port, script
from unshard.launcher import meeting, orphans
from unshard.launcher.connect import ssh_argv
from unshard.launcher.errors import LaunchError
from unshard.launcher.frames import MAGIC, Unpacker, pack
from unshard.launcher.gather import gather, proof
from unshard.launcher.job import attempt_on_hosts
from unshard.launcher.link import STATED_BY_HOST_0, SocketLink
from unshard.launcher.node_plan import make_node_plan
from unshard.launcher.options import build_parser
from unshard.launcher.outlet import Outlet
from unshard.launcher.plan import Plan, Share, make_plan
from unshard.launcher.preflight import check, settle_meeting_point
from unshard.launcher.tools import decode, tool_argv, tool_environment


def test_frames_survive_noise_and_any_cut():
    sent = [("output", {"rank": 3}, b"x" * 50 + MAGIC[:5] + b"\n"), ("hello", {"words": "é\n"}, b""), ("done", {}, MAGIC)]
    stream = b"Welcome!\n" + b"".join(pack(kind, payload, **fields) for kind, fields, payload in sent) + b"bye" + MAGIC[:4]
    for step in (1, 2, 7, len(stream)):
        unpacker, frames, noise = Unpacker(), [], b""
        for at in range(0, len(stream), step):
            for fields, payload in unpacker.feed(stream[at:at + step]):
                if fields is None:
                    noise += payload
                else:
                    frames.append((fields.pop("kind"), {name: fields[name] for name in fields if name != "size"}, payload))
        assert frames == sent and noise + unpacker.rest() == b"Welcome!\nbye" + MAGIC[:4]


def answer(**changes):
    return {"protocol": 1, "unshard": unshard.__version__, "torch": "2.13.0", "python": "3.11.7", "machine": str(changes), **changes}


def test_preflight_stops_at_definite_mismatches_only():
    for other, why in ((answer(unshard="9.9"), "b has unshard 9.9"), (answer(torch="2.12.0"), "2.13.0 on a; 2.12.0 on b"),
                       (answer(protocol=0), "install the same version")):
        with pytest.raises(LaunchError, match=why):
            check({"a": answer(), "b": other}, False, pytest.fail)
    for other, why in ((answer(torch="2.13.0+cu128"), "builds of torch"), (answer(torch=None), "doesn't say"),
                       (answer(python="3.12.1"), "versions of Python"), (answer(), "are one machine")):
        warned = []
        check({"a": answer(), "b": other}, False, warned.append)
        assert len(warned) == 1 and why in warned[0]
    warned = []
    check({"a": answer(), "b": answer(unshard="9.9")}, True, warned.append)
    assert len(warned) == 1


def test_the_hosts_meet_where_they_saw_rank_0():
    def meeting_point(local, **answers):
        plan = Plan("ssh", [Share("a", [0]), Share("b", [0])], {}, "", None, -1, 0, local, [])
        settle_meeting_point(plan, answers, lambda words: None)
        return plan.master_addr, plan.master_port

    assert meeting_point([], a={"port": 29500, "address": "10.0.0.7"}, b={}) == ("10.0.0.7", 29500)
    assert meeting_point(["a"], a={"port": 1234, "address": ""}, b={"launcher_address": "10.0.0.9"}) == ("10.0.0.9", 1234)
    assert meeting_point([], a={"port": 29500, "address": "127.0.0.1"}, b={}) == ("a", 29500)


class Quiet:
    outlet = Outlet()

    def say(self, text):
        pass

    warn = error = say


def meeting_plan(hosts, **changes):
    task = {"environment": {"PASSWORD": "hunter2"}, "arguments": ["--token=hunter2"], "script": "train.py"}
    shares = [Share("host0", [0]), *[Share(f"host{node}", None) for node in range(1, hosts)]]
    return Plan("meet", shares, task, "127.0.0.1", free_port(), 0, 0, [], [], **changes)


def knock(plan, data=b""):
    for _ in range(500):
        try:
            connection = socket.create_connection(("127.0.0.1", plan.master_port), 10)
            break
        except ConnectionRefusedError:           # it isn't listening yet
            time.sleep(0.01)
    connection.sendall(data)
    return connection


def join_frame(plan, node, secret, **changes):
    join = {"node_rank": node, "nodes": len(plan.shares), "slots": [0, 1], "hostname": f"h{node}"}
    return pack("join", **{**join, "proof": proof(secret, join), **changes})


def beside(function, *arguments):
    """Its future, from a thread that keeps no failing test from ending."""
    future = concurrent.futures.Future()

    def work():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def frames_from(connection):
    """Until the other side hangs up."""
    unpacker, frames = Unpacker(), []
    try:
        while data := connection.recv(4096):
            frames += [fields for fields, _ in unpacker.feed(data)]
    except ConnectionResetError:                 # it hung up without having read everything
        pass
    return frames


def test_strangers_neither_hold_up_a_meeting_nor_learn_anything(here):
    plan = meeting_plan(3, secret="sesame")
    begin, links = time.monotonic(), beside(gather, plan, Quiet())
    silent, slow = knock(plan), knock(plan, MAGIC[:3])
    wrong = [knock(plan, join_frame(plan, 1, "sesame", **change)) for change in
             ({"hostname": None}, {"slots": []}, {"slots": [-1]}, {"node_rank": "1"}, {"proof": 7})]
    wrong.append(knock(plan, MAGIC + b"[1]\n"))
    wrong.append(knock(plan, b"GET / HTTP/1.0\r\n\r\n"))
    assert [frames_from(connection) for connection in wrong] == [[]] * len(wrong)
    for node, secret, why in ((1, "", "secret"), (1, "guess", "secret"), (0, "sesame", "another host")):
        (end,) = frames_from(knock(plan, join_frame(plan, node, secret)))
        assert end["kind"] == "end" and end["code"] == 2 and why in end["words"]
    second, first = knock(plan, join_frame(plan, 2, "sesame")), knock(plan, join_frame(plan, 1, "sesame") + pack("stop"))
    links = links.result(10)
    assert time.monotonic() - begin < 8 and silent.recv(1) == slow.recv(1) == b""       # a stranger's own limit is 10 s
    assert [share.first_rank for share in plan.shares] == [0, 1, 3] and links[2].host == "h2 (host 2)"
    assert links[1].receive()[0][0]["kind"] == "stop"        # what came right after a join isn't lost
    for node, link in links.items():
        link.give_order(plan.order(node, "id"))
        link.close()
    for node, connection in ((1, first), (2, second)):
        (order,) = frames_from(connection)
        assert order["node_rank"] == node and "hunter2" not in str(order)
        assert set(order) == {*STATED_BY_HOST_0, "kind", "size"}


def test_a_host_that_leaves_a_meeting_may_come_again_unless_a_tool_started_it(here):
    plan = meeting_plan(4, by_tool=True)
    links = beside(gather, plan, Quiet())
    other = knock(plan, join_frame(plan, 2, ""))
    knock(plan, join_frame(plan, 1, "") + pack("hello")).close()
    with pytest.raises(LaunchError, match="has left before all had come"):
        links.result(10)
    assert "has left" in frames_from(other)[0]["words"]
    plan, heard = meeting_plan(3), []
    links = beside(gather, plan, SimpleNamespace(say=lambda text: None, warn=heard.append))
    knock(plan, join_frame(plan, 1, "") + pack("hello")).close()
    while not heard:
        time.sleep(0.01)
    kept = [knock(plan, join_frame(plan, node, "", hostname="back")) for node in (1, 2)]
    assert links.result(10)[1].host == "back (host 1)" and "waiting until it comes again" in heard[0]
    assert len(kept) == 2


@pytest.mark.parametrize("ordered", [False, True])
def test_a_host_that_waits_for_host_0_can_be_ended(here, ordered):
    """Here host 0 never answers. Before there is an order one signal is enough, after it the second."""
    name = script(here, "")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        words = [sys.executable, "-m", "unshard.launcher", "--no_ssh", "--num_nodes=2", "--node_rank=1", "--master_addr=127.0.0.1",
                 f"--master_port={port}", "--num_gpus=1", name]
        process = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
        connection, _ = listener.accept()
        unpacker, kinds = Unpacker(), []

        def await_kind(kind):
            while kind not in kinds:
                kinds.extend(fields["kind"] for fields, _ in unpacker.feed(connection.recv(4096)))

        await_kind("hello")
        if ordered:
            order = {"first_rank": 1, "world": 2, "node_rank": 1, "nodes": 2, "master_addr": "127.0.0.1", "master_port": free_port(),
                     "run_id": "test", "attempt": 0, "max_restarts": 0}
            connection.sendall(pack("order", **order))
            time.sleep(0.5)                      # no answer says that it has come
        process.send_signal(signal.SIGTERM)
        if ordered:
            await_kind("interrupted")
            process.send_signal(signal.SIGTERM)
        assert process.wait(8) == 128 + signal.SIGTERM
        assert ("ranks of this host were ended" if ordered else "no ranks had been started") in process.stderr.read()
        process.stderr.close()
        connection.close()


def test_the_hosts_of_a_meeting_are_told_why_it_fails(here, monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(meeting, "links_of_meeting", lambda plan, voice: [SocketLink("w", ours, Unpacker())])
    theirs.sendall(pack("hello", **answer(unshard="9.9", protocol=0)))
    options = SimpleNamespace(connect_timeout=5, no_ssh_check=False)
    with pytest.raises(LaunchError, match="install the same version"):
        attempt_on_hosts(meeting_plan(1), options, Quiet(), 0)
    (end,) = frames_from(theirs)
    assert (end["kind"], end["code"], end["again"]) == ("end", 2, False) and "install the same version" in end["words"]


def test_what_comes_over_the_network_is_checked():
    for frame in (pack("failed", rank=1), pack("failed", rank="x", status=1, tail=[]), pack("strange"), MAGIC + b"{}\n", MAGIC + b"7\n",
                  b"noise"):
        ours, theirs = socket.socketpair()
        theirs.sendall(frame)
        link = SocketLink("w", ours, Unpacker())
        assert link.receive() is None, frame
        link.close()
        theirs.close()


@pytest.mark.parametrize("tool", ["pdsh", "slurm", "openmpi"])
def test_no_tools_command_line_shows_the_environment(here, monkeypatch, tool):
    (here / "hosts").write_text("worker-1 slots=1\nworker-2 slots=1\n")
    (here / ".deepspeed_env").write_text("PASSWORD=hunter2\n")
    options = build_parser("test").parse_args(["--hostfile=hosts", f"--launcher={tool}", "--ssh_port=2200", script(here, ""), "x y"])
    plan = make_plan(options, lambda: 0)
    argv, shown = tool_argv(plan, options)
    environment = tool_environment(plan, options)
    carried = environment["UNSHARD_TOOL_TASK"]
    meeting = decode(carried)
    assert meeting.task["environment"]["PASSWORD"] == "hunter2" and meeting.task["arguments"] == ["x y"] and meeting.by_tool
    for word in [*argv, *shown.values(), *json.loads(environment.get("UNSHARD_TOOL_SSH", "[]"))]:
        assert "hunter2" not in word and carried not in word and meeting.secret not in word
    assert len(meeting.secret) == 32 and meeting.secret != decode(tool_environment(plan, options)["UNSHARD_TOOL_TASK"]).secret


def test_ssh_takes_no_host_for_an_option(here):
    options = build_parser("test").parse_args(["--launcher_args=-F config", "train.py"])
    assert ssh_argv(options, "-oProxyCommand=x", "true")[-5:] == ["-F", "config", "--", "-oProxyCommand=x", "true"]


def test_what_is_true_of_one_host_or_attempt_is_not_exported(here, monkeypatch):
    (here / "hosts").write_text("worker-1 slots=1\nworker-2 slots=1\n")
    (here / ".deepspeed_env").write_text("RANK=7\nUNSHARD_RESTART_COUNT=9\nOMP_NUM_THREADS=3\n")
    for name in ("UNSHARD_RESTART_COUNT", "UNSHARD_HOST", "UNSHARD_MEETING_SECRET", "MV2_COMM_WORLD_RANK", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "7")
    options = build_parser("test").parse_args(["--hostfile=hosts", script(here, "")])
    plan = make_plan(options, lambda: 0)
    environment = make_node_plan(plan.order(1, "id", 2, master_addr="127.0.0.1"), lambda: 0).environment
    assert environment["UNSHARD_RESTART_COUNT"] == "2" and environment["CROSS_RANK"] == "1"
    assert environment["NCCL_DEBUG"] == "7" and environment["OMP_NUM_THREADS"] == "3"
    assert not {"RANK", "UNSHARD_HOST", "UNSHARD_MEETING_SECRET", "MV2_COMM_WORLD_RANK"} & set(environment)


def test_a_process_that_survives_sigkill_is_named_and_left(capfd, monkeypatch):
    before = orphans.children()
    process = subprocess.Popen(["sleep", "60"])
    with monkeypatch.context() as patch:
        patch.setattr(orphans.os, "kill", lambda pid, number: None)         # as for a process that hangs in the kernel
        assert orphans.end_all_but(before, limit_s=0.1) == {process.pid}
    assert f"pid {process.pid} is still there" in capfd.readouterr().err
    assert orphans.end_all_but(before) == set()
    process.returncode = 0                       # reaped by that
