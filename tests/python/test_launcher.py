"""The launcher: what a rank gets, what the launcher returns, and that nothing is left behind. Needs torch, not the engine."""
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import unshard
from unshard.launcher.cores import parse_core_list, share_out
from unshard.launcher.env_file import parse_env_lines
from unshard.launcher.errors import LaunchError
from unshard.launcher.exit_status import exit_status
from unshard.launcher.frames import MAGIC, Unpacker, pack
from unshard.launcher.hosts import parse_filter, read_hostfile, select
from unshard.launcher.node_plan import make_node_plan
from unshard.launcher.options import build_parser
from unshard.launcher.plan import Plan, Share, make_plan
from unshard.launcher.ports import choose_port
from unshard.launcher.preflight import check, settle_meeting_point
from unshard.launcher.report import Printer, ranges
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
    except FileNotFoundError:
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
                      ("w slots=0\n", "no slots"), ("# nothing\n", "names no host")):
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


def test_core_lists():
    mine = sorted(os.sched_getaffinity(0))
    assert parse_core_list(f"{mine[0]}") == [mine[0]]
    assert share_out([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    for wrong in ("x", "1-", "0,0", "99999"):
        with pytest.raises(LaunchError):
            parse_core_list(wrong)
    with pytest.raises(LaunchError, match="3 ranks can't share 2 cores"):
        share_out([0, 1], 3)
