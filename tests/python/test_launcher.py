"""The launcher: what a rank gets, what the launcher returns, and that nothing is left behind. Needs torch, not the engine."""
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import unshard
from unshard.launcher import meeting, orphans
from unshard.launcher.connect import ssh_argv
from unshard.launcher.cores import parse_core_list, share_out
from unshard.launcher.env_file import parse_env_lines
from unshard.launcher.errors import LaunchError
from unshard.launcher.exit_status import exit_status
from unshard.launcher.frames import MAGIC, Unpacker, pack
from unshard.launcher.gather import gather, proof
from unshard.launcher.hosts import parse_filter, read_hostfile, select
from unshard.launcher.job import attempt_on_hosts
from unshard.launcher.link import STATED_BY_HOST_0, SocketLink
from unshard.launcher.node_plan import make_node_plan
from unshard.launcher.options import build_parser
from unshard.launcher.plan import Plan, Share, make_plan
from unshard.launcher.ports import choose_port
from unshard.launcher.preflight import check, settle_meeting_point
from unshard.launcher.report import Printer, ranges
from unshard.launcher.tools import decode, tool_argv, tool_environment
from unshard.launcher.watch import Watch

PYTHON_DIR = str(pathlib.Path(__file__).resolve().parents[2] / "python")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR",
                  "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working and home folder, and no variables of a surrounding job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(*arguments):
    return [sys.executable, "-m", "unshard.launcher", f"--master_port={free_port()}", *arguments]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([PYTHON_DIR, os.environ.get("PYTHONPATH", "")])}


def launch(*arguments, port=True):
    words = command(*arguments)
    if not port:
        words = [word for word in words if not word.startswith("--master_port")]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)


def script(folder, text, name="train.py"):
    (folder / name).write_text(textwrap.dedent(text))
    return name


def plan_of(*arguments, devices=0):
    """What this machine's ranks would get."""
    plan = make_plan(build_parser("test").parse_args(arguments), lambda: devices)
    assert plan.way == "here"
    return make_node_plan(plan.order(0, "test"), lambda: devices)


WRITE_WHAT_I_GOT = """
    import json, os, sys
    with open(f"got{os.environ['RANK']}.json", "w") as file:
        json.dump({"env": dict(os.environ), "argv": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0))}, file)
"""


def got(folder, rank):
    return json.loads((folder / f"got{rank}.json").read_text())


# ---- what a rank gets

def test_arguments_arrive_unchanged(here):
    words = ["two words", "", "quote\"s and 'these'", "$HOME ${local_rank} $$ `id`", "a;b|c&d", "a\nb", "back\\slash", "--flag=x y", "é"]
    done = launch("--num_gpus=2", script(here, WRITE_WHAT_I_GOT), *words)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert got(here, rank)["argv"] == [f"--local_rank={rank}", *words]


def test_no_local_rank_leaves_the_arguments_alone(here):
    assert launch("--no_local_rank", script(here, WRITE_WHAT_I_GOT), "x").returncode == 0
    assert got(here, 0)["argv"] == ["x"]


def test_environment_of_a_rank(here):
    done = launch("--num_gpus=2", script(here, WRITE_WHAT_I_GOT))
    assert done.returncode == 0, done.stderr
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in range(2):
        env = got(here, rank)["env"]
        want = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        assert {key: env[key] for key in want} == want
        assert env["MASTER_PORT"].isdigit()
        assert int(env["OMP_NUM_THREADS"]) <= int(threads)


def test_the_users_thread_count_stays(here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch(script(here, WRITE_WHAT_I_GOT)).returncode == 0
    assert got(here, 0)["env"]["OMP_NUM_THREADS"] == "7"


def test_module_and_program(here):
    script(here, WRITE_WHAT_I_GOT, "as_module.py")
    assert launch("--module", "as_module", "x").returncode == 0
    assert got(here, 0)["argv"] == ["--local_rank=0", "x"]
    done = launch("--no_python", "--no_local_rank", "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $1"', "sh", "a b")
    assert done.stdout == "0 of 1: a b\n", done.stderr


def test_a_compiled_program_needs_no_flag(here):
    (here / "program").symlink_to(shutil.which("env"))
    done = launch("--nproc=2", "--no_local_rank", "program")
    assert done.returncode == 0, done.stderr
    assert {f"[rank {rank}] {line}" for rank in range(2) for line in (f"RANK={rank}", "WORLD_SIZE=2")} <= set(done.stdout.splitlines())


def test_env_file_with_comments_and_blank_lines(here):
    (here / ".deepspeed_env").write_text("# for every rank\n\nGREETING=hello there\n   \nEMPTY=\n")
    assert launch(script(here, WRITE_WHAT_I_GOT)).returncode == 0
    env = got(here, 0)["env"]
    assert (env["GREETING"], env["EMPTY"]) == ("hello there", "")
    with pytest.raises(LaunchError, match="f:2: 'no equals sign'"):
        parse_env_lines(["A=1\n", "no equals sign\n"], "f")


def test_ranks_share_a_store_and_can_talk(here):
    done = launch("--num_gpus=2", script(here, """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        sys.stdout.write(f"sum {total.item()} ")
        dist.destroy_process_group()
    """))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 cores")
def test_bind_cores_to_rank(here):
    assert launch("--num_gpus=2", "--bind_cores_to_rank", script(here, WRITE_WHAT_I_GOT)).returncode == 0
    first, second = got(here, 0)["cores"], got(here, 1)["cores"]
    assert first and second and not set(first) & set(second)


# ---- how a job ends

def test_first_failing_ranks_code_is_kept_and_the_rest_ended(here):
    name = script(here, """
        import os, sys, time
        if os.environ["RANK"] == "1":
            time.sleep(1)
            sys.exit(3)
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    """)
    begin = time.monotonic()
    done = launch("--num_gpus=2", name)
    assert done.returncode == 3
    assert time.monotonic() - begin < 10
    assert "rank 1 failed with exit code 3" in done.stderr
    assert not alive(int((here / "pid").read_text()))


def test_a_rank_that_ignores_sigterm_is_ended_within_5_seconds(here):
    name = script(here, """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"ready{os.environ['RANK']}", "w").close()
        while not (os.path.exists("ready0") and os.path.exists("ready1")):
            time.sleep(0.01)
        if os.environ["RANK"] == "0":
            with open("failed_at", "w") as file:
                file.write(str(time.time()))
            sys.exit(5)
        time.sleep(60)
    """)
    done = launch("--num_gpus=2", name)
    assert done.returncode == 5
    assert time.time() - float((here / "failed_at").read_text()) < 5.5


def test_status_of_a_process_that_was_reaped():
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    for code, wanted in (("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9), ("", 0)):
        process = subprocess.Popen([sys.executable, "-S", "-c", code])
        pidfd = os.pidfd_open(process.pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert exit_status(pidfd) == wanted
        process.wait()
        assert exit_status(pidfd) == (wanted if release >= (6, 15) else None)
        os.close(pidfd)


def test_a_rank_that_the_agent_reaped_first_is_judged_by_the_agents_code(here):
    class Sink:
        heard = []

        def failed(self, rank, status, tail):
            self.heard.append((rank, status))

    plan = SimpleNamespace(ranks=3, first_rank=4, world=9, log_dir="")
    for codes, wanted in (({}, []), ({5: 3, 6: -15}, [(5, 3)]), ({6: 2}, [(6, 2)])):
        watch, Sink.heard = Watch(plan, Sink(), both_streams=False), []
        watch._unsure = [(0, None), (1, None), (2, None)]
        watch.stop()
        watch.settle(codes)
        assert Sink.heard == wanted


def test_the_first_failure_comes_first_even_when_another_follows_at_once(here):
    name = script(here, """
        import os, sys, time
        if os.environ["RANK"] == "1":
            raise RuntimeError("the real cause")
        while True:                       # rank 0 notices, as a collective would, and fails too
            time.sleep(0.005)
            if os.path.exists("gone"):
                raise RuntimeError("a peer is gone")
    """)
    wrapper = script(here, """
        import os, runpy, sys
        try:
            runpy.run_path("train.py", run_name="__main__")
        except BaseException:
            import traceback
            traceback.print_exc()
            if os.environ["RANK"] == "1":
                os.system("(sleep 0.03; touch gone) &")
            os._exit(11 if os.environ["RANK"] == "1" else 12)
    """, "wrapper.py")
    assert name == "train.py"
    done = launch("--num_gpus=2", wrapper)
    assert done.returncode == 11, done.stderr
    report = done.stderr.index("rank 1 failed with exit code 11")
    assert "| RuntimeError: the real cause" in done.stderr[report:]
    assert "a peer is gone" not in done.stderr[:report]


def test_a_rank_killed_by_a_signal_gives_128_plus_its_number(here):
    done = launch("--num_gpus=2", script(here, """
        import os, signal, time
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """))
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 was ended by SIGKILL" in done.stderr


FAMILY = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    with open(f"pids{os.environ['RANK']}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(f"pids{os.environ['RANK']}", f"written{os.environ['RANK']}")
    time.sleep(float(sys.argv[-1]))
    if os.environ["RANK"] == "1":
        sys.exit(4)
    time.sleep(60)
"""


def family_pids(folder, wait=20):
    end = time.monotonic() + wait
    while not all((folder / f"written{rank}").exists() for rank in range(2)):
        assert time.monotonic() < end, "the ranks didn't start"
        time.sleep(0.05)
    return [int(pid) for rank in range(2) for pid in (folder / f"written{rank}").read_text().split()]


def test_what_the_ranks_started_is_ended_too(here):
    assert launch("--num_gpus=2", script(here, FAMILY), "0.3").returncode == 4
    assert not [pid for pid in family_pids(here) if alive(pid)]


def test_ctrl_c_ends_everything(here):
    process = subprocess.Popen(command("--num_gpus=2", script(here, FAMILY), "60"), env=environment(), stderr=subprocess.PIPE, text=True)
    pids = family_pids(here)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "SIGINT: all ranks were ended" in said
    assert not [pid for pid in pids if alive(pid)]


def test_ranks_die_with_a_killed_launcher(here):
    process = subprocess.Popen(command("--num_gpus=2", script(here, FAMILY), "60"), env=environment(), stderr=subprocess.DEVNULL)
    pids = family_pids(here)
    process.kill()
    process.wait()
    end = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- output

def test_lines_carry_their_rank(here):
    name = script(here, """
        import os, sys
        print("out of", os.environ["RANK"])
        print("err of", os.environ["RANK"], file=sys.stderr)
        sys.stdout.write("no end")
    """)
    done = launch("--num_gpus=2", name)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] no end", "[rank 0] out of 0", "[rank 1] no end", "[rank 1] out of 1"]
    assert sorted(done.stderr.splitlines()) == ["[rank 0] err of 0", "[rank 1] err of 1"]
    assert sorted(launch("--num_gpus=2", "--no_rank_prefix", "--no_python", "echo", "x").stdout.splitlines()) == ["--local_rank=0 x",
                                                                                                                "--local_rank=1 x"]


def test_printer_keeps_lines_whole(capfd):
    printer = Printer(True)
    printer.write(0, 1, b"first ha")
    printer.write(1, 1, b"whole\n")
    printer.write(0, 1, b"lf\nsecond")
    printer.flush()
    printer.write(0, 1, b" part\n10%\r20%")
    printer.close()
    assert capfd.readouterr().out.split("\n") == ["[rank 1] whole", "[rank 0] first half", "[rank 0] second part",
                                                  "[rank 0] 10%\r[rank 0] 20%", ""]
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7, 8"


def test_restarts(here):
    name = script(here, """
        import os, sys
        count = int(os.environ["UNSHARD_RESTART_COUNT"])
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(count)
        with open(f"attempt{count}-{os.environ['RANK']}", "w"):
            pass
        sys.exit(0 if count == 2 else 3)
    """)
    done = launch("--num_gpus=2", "--max-restarts=2", name)
    assert done.returncode == 0, done.stderr
    assert {path.name[:8] for path in here.glob("attempt*-*")} == {"attempt0", "attempt1", "attempt2"}
    assert "restart 2 of 2" in done.stderr
    assert launch("--max-restarts=1", name).returncode == 3


def test_a_log_for_each_rank(here):
    name = script(here, """
        import os, sys
        print("said by", os.environ["RANK"])
        print("complaint of", os.environ["RANK"], file=sys.stderr)
        sys.exit(int(os.environ["RANK"]))
    """)
    done = launch("--num_gpus=2", "--enable_each_rank_log", "logs", name)
    assert done.returncode == 1
    assert done.stdout == ""
    assert (here / "logs" / "rank1.log").read_text() == "said by 1\ncomplaint of 1\n"
    assert "| complaint of 1" in done.stderr


def test_dry_run_starts_nothing(here):
    done = launch("--num_gpus=2", "--dry-run", script(here, WRITE_WHAT_I_GOT), "a b")
    assert done.returncode == 0
    assert "2 ranks on CPU" in done.stdout and "--local_rank=1 'a b'" in done.stdout and "LOCAL_SIZE=2" in done.stdout
    assert not (here / "got0.json").exists()


def test_save_pid_file_lives_as_long_as_the_job(here, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(here))
    done = launch("--save_pid", script(here, """
        import glob, os
        print([int(open(name).read()) == int(name[:-3]) == os.getppid() for name in glob.glob("*.ds")])
    """))
    assert done.stdout == "[True]\n", done.stderr
    assert not list(here.glob("*.ds"))


# ---- between hosts (test_launcher_hosts.py has the hosts)

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


# ---- which ranks, where

def test_number_of_ranks(here):
    script(here, "")
    assert plan_of("train.py").ranks == 1
    assert plan_of("--num_gpus=3", "train.py").ranks == 3
    assert plan_of("train.py", devices=4).devices == ["0", "1", "2", "3"]
    assert plan_of("--num_accelerators=2", "train.py", devices=4).environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(LaunchError, match="shows 4 GPUs"):
        plan_of("--num_gpus=5", "train.py", devices=4)


def test_visible_devices_are_kept_unless_filtered(here, monkeypatch):
    script(here, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert plan_of("train.py", devices=2).devices == ["4", "6"]
    assert plan_of("--include=localhost:5", "train.py", devices=2).devices == ["5"]


def test_include_and_exclude(here):
    script(here, "")
    assert plan_of("--include", "localhost:0,2", "train.py", devices=4).devices == ["0", "2"]
    assert plan_of("--exclude", "localhost:1", "train.py", devices=3).devices == ["0", "2"]
    assert plan_of("--include", "localhost:0,1", "train.py").ranks == 2
    for wrong, why in ((["--include=localhost:9"], "no slot 9"), (["--include=elsewhere"], "no host 'elsewhere'"),
                       (["--exclude=localhost"], "leaves no slot"), (["--include=localhost", "--num_gpus=1"], "can't be used together")):
        with pytest.raises(LaunchError, match=why):
            plan_of(*wrong, "train.py", devices=2)


def test_filter_syntax():
    pool = {"a": [0, 1, 2], "b": [0, 1]}
    assert select(pool, include="b@a:2,0") == {"a": [0, 2], "b": [0, 1]}
    assert select(pool, exclude="a:1@b") == {"a": [0, 2]}
    for wrong in ("a:", "a:x", "@", "a@a", "a:1,1"):
        with pytest.raises(LaunchError):
            parse_filter(wrong, "--include")


def test_hostfile(here):
    path = here / "hosts"
    path.write_text("# a comment\n\nlocalhost slots=2   # this machine\n")
    assert read_hostfile(path) == {"localhost": 2}
    script(here, "")
    assert plan_of("--hostfile=hosts", "train.py").ranks == 2
    assert plan_of("--hostfile=hosts", "--num_gpus=1", "train.py").ranks == 1
    assert plan_of("--hostfile=missing", "train.py").ranks == 1
    for text, why in (("w slots=eight\n", "hosts:1: 'w slots=eight'"), ("w slots=8\nw slots=8\n", "hosts:2: host 'w' is listed twice"),
                      ("w slots=0\n", "no slots"), ("# nothing\n", "names no host"),
                      ("-oProxyCommand=x slots=1\n", "can't be a host's name"), ("a;b slots=1\n", "can't be a host's name")):
        path.write_text(text)
        with pytest.raises(LaunchError, match=why):
            plan_of("--hostfile", str(path), "--num_nodes=2", "train.py")


def test_contradictions_are_refused(here):
    script(here, "")
    for wrong, why in (("--num_nodes=2", "--num_nodes=2 needs a hostfile"),
                       ("--node_rank=1", "give --no_ssh too"),
                       ("--no_ssh --num_nodes=2", "needs --node_rank"),
                       ("--no_ssh --node_rank=0", "needs a hostfile or --num_nodes"),
                       ("--no_ssh --num_nodes=2 --node_rank=1", "needs --master_addr"),
                       ("--no_ssh --launcher=pdsh", "can't be used together"),
                       ("--no_python --module", "can't be used together"),
                       ("--bind_core_list=0", "--bind_cores_to_rank shares out"),
                       ("--max-restarts=-1", "0 or more")):
        with pytest.raises(LaunchError, match=why):
            plan_of(*wrong.split(), "train.py")


def test_missing_programs_of_others(here, monkeypatch):
    (here / "hosts").write_text("worker-1 slots=8\nworker-2 slots=8\n")
    monkeypatch.setenv("PATH", "/nowhere")
    for tool, program in (("ssh", "ssh"), ("pdsh", "pdsh"), ("slurm", "srun"), ("openmpi", "mpirun")):
        done = launch("--hostfile=hosts", f"--launcher={tool}", script(here, ""))
        assert done.returncode == 2 and program in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_ports(here):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--master_port={port} is taken"):
            choose_port(port, [])
    with pytest.raises(LaunchError, match="is not a port"):
        choose_port(70000, [])


def test_a_free_port_is_chosen_where_the_default_is_taken(here):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", 29500))
            taken.listen()
        except OSError:
            pass                          # taken already, by someone else: as good
        done = launch(script(here, WRITE_WHAT_I_GOT), port=False)
    assert done.returncode == 0, done.stderr
    assert got(here, 0)["env"]["MASTER_PORT"] != "29500"
    assert "port 29500 is taken" in done.stderr


def test_mistakes_are_one_line(here):
    for words, why in ((["nothing.py"], "there is no script 'nothing.py'"), (["--no_python", "no-such-program"], "no program"),
                       (["--autotuning=run", "x.py"], "--autotuning is not built yet"), (["--num_gpus=0", "x.py"], "at least 1 rank")):
        done = launch(*words)
        assert done.returncode == 2
        assert why in done.stderr and done.stderr.count("\n") == 1


def test_paths_and_addresses_that_cant_be_used_are_one_line(here, monkeypatch):
    script(here, "")
    (here / "file").write_text("")
    for flag in ("--enable_each_rank_log=file", "--enable_each_rank_log=/proc/no/folder", "--run-dir=file", "--run-dir=file/below",
                 "--timeline=file", "--master_addr=nosuchhost.invalid"):
        done = launch("--num_gpus=2", flag, "train.py")
        assert done.returncode == 2 and flag.partition("=")[0] in done.stderr and done.stderr.count("\n") == 1, done.stderr
    for name in ("/nonexistent", "nonexistent"):
        monkeypatch.setenv("DS_ENV_FILE", name)
        with pytest.raises(LaunchError, match=f"DS_ENV_FILE={name}: there is no such file"):
            plan_of("train.py")


def test_core_lists():
    mine = sorted(os.sched_getaffinity(0))
    assert parse_core_list(f"{mine[0]}") == [mine[0]]
    assert share_out([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    for wrong in ("x", "1-", "0,0", "99999"):
        with pytest.raises(LaunchError):
            parse_core_list(wrong)
    with pytest.raises(LaunchError, match="3 ranks can't share 2 cores"):
        share_out([0, 1], 3)
