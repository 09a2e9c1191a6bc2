"""The launcher: what a rank gets, what the launcher returns, and that nothing is left behind. Needs torch, not the engine."""
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from launching import WRITE_WHAT_I_GOT, alive, command, environment, got, launch, script
from unshard.launcher.env_file import parse_env_lines
from unshard.launcher.errors import LaunchError
from unshard.launcher.exit_status import exit_status
from unshard.launcher.report import Printer, ranges
from unshard.launcher.watch import Watch


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
