"""Commands whose output can't be written: closed, full, or without a reader. Needs torch, not the engine."""
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from launching import alive, command, environment, script
from unshard.launcher.outlet import Outlet
from unshard.launcher.report import Report
from unshard.launcher.watch import Watch, write_all

TALK = """
    import os, sys, time
    names = ["pid" + str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
    with open("pid" + os.environ["RANK"], "w") as file:
        file.write(str(os.getpid()))
    while not all(os.path.exists(name) and os.path.getsize(name) for name in names):     # nobody is ended before it is here
        time.sleep(0.01)
    for i in range(100_000):
        print("line", i)
    open("done" + os.environ["RANK"], "w").close()
"""


def run(words, redirection):
    """subprocess.run of it by a shell, with this put behind."""
    shell = ["bash", "-c", f'"$@" {redirection}', "bash"]
    return subprocess.run([*shell, *words], env=environment(), capture_output=True, text=True, timeout=60)


def start(*arguments, **pipes):
    return subprocess.Popen(command(*arguments), env=environment(), **pipes)


# ---- the launcher

@pytest.mark.parametrize("both", [False, True])
def test_a_reader_that_goes_ends_the_job_quietly(here, both):
    process = start("--num_gpus=2", script(here, TALK), stdout=subprocess.PIPE, stderr=subprocess.STDOUT if both else subprocess.PIPE)
    assert process.stdout.readline().endswith(b"line 0\n")
    process.stdout.close()
    said = b"" if both else process.stderr.read()
    assert process.wait(20) == 128 + signal.SIGPIPE
    assert said == b""
    assert not any((here / f"done{rank}").exists() for rank in range(2))
    assert not [rank for rank in range(2) if alive(int((here / f"pid{rank}").read_text()))]


def test_a_full_disk_is_said_and_the_ranks_go_on(here):
    done = run(command("--num_gpus=2", script(here, TALK)), ">/dev/full")
    first, last = done.stderr.splitlines()
    assert first.startswith("[unshard run] standard output can't be written: No space left on device; the ranks go on")
    assert "all ranks ended well, but" in last and done.returncode == 1
    assert all((here / f"done{rank}").exists() for rank in range(2))


def test_the_failing_ranks_code_is_kept_where_nothing_can_be_said(here):
    done = run(command("--num_gpus=2", script(here, "import os, sys; sys.exit(7 * int(os.environ['RANK']))")), ">/dev/full 2>/dev/full")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_a_single_rank_has_the_output_itself(here):
    for words in (["--no_python", "--no_local_rank", "sh", "-c", "sleep 0.1; echo x"], [script(here, TALK)]):
        process = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        said = process.stderr.read().decode()
        if words[-1] == "train.py":                              # an exception of the script's, as without a launcher
            assert "BrokenPipeError" in said and "rank 0 failed" in said and process.wait(20) == 1
        else:
            assert (process.wait(20), said) == (128 + signal.SIGPIPE, "")
        process.stderr.close()


@pytest.mark.parametrize("ranks, closed", [(1, ">&-"), (2, ">&-"), (2, "2>&-"), (1, "<&- >&- 2>&-"), (2, "<&- >&- 2>&-")])
def test_closed_descriptors_are_the_null_device(here, ranks, closed):
    name = script(here, """
        import os, sys
        print("out of", os.environ["RANK"])
        print("err of", os.environ["RANK"], file=sys.stderr)
        open("done" + os.environ["RANK"], "w").close()
    """)
    done = run(command(f"--num_gpus={ranks}", name), closed)
    assert done.returncode == 0, done.stderr
    assert all((here / f"done{rank}").exists() for rank in range(ranks))
    assert done.stdout.count("out of") == (0 if " >&-" in f" {closed}" else ranks)
    assert done.stderr.count("err of") == (0 if "2>&-" in closed else ranks)


def test_a_watch_that_fails_leaves_no_rank_waiting(here):
    class Broken:
        reader_gone = False

        def output(self, rank, stream, data):
            raise RuntimeError("a fault of the launcher")

        def idle(self):
            pass

    watch = Watch(SimpleNamespace(ranks=1, first_rank=0, world=1, log_dir=""), Broken(), both_streams=True)
    rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    os.write(watch.started_write, f"0 {rank.pid}\n".encode())
    watch._add_ranks()
    os.write(watch.pipes[0, 1][1], b"a word")
    with pytest.raises(RuntimeError):
        watch._run()
    assert rank.wait(5) == -signal.SIGKILL


def test_ranks_that_ignore_sigterm_are_killed_when_the_reader_goes(here):
    """At the grace's end; Watch alone, without an agent beside it."""
    plan, quiet = SimpleNamespace(ranks=1, first_rank=0, world=1, log_dir=""), Report(1, True)
    quiet.printer.outlet.reader_gone = True
    rank = subprocess.Popen([sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); print(); time.sleep(60)"],
                            stdout=subprocess.PIPE, start_new_session=True)
    rank.stdout.read(1)
    watch = Watch(plan, quiet, both_streams=True)
    os.write(watch.started_write, f"0 {rank.pid}\n".encode())
    begin = time.monotonic()
    watch.start()
    assert rank.wait(10) == -signal.SIGKILL and 3 < time.monotonic() - begin < 8
    watch.stop()
    rank.stdout.close()
    assert not quiet.any_failure and quiet.conclude({0: -9}) == 128 + signal.SIGPIPE


def test_an_outlet_tries_again(capfd):
    outlet, (read, write) = Outlet(), os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    before = os.dup(1)
    try:
        os.dup2(full, 1)
        outlet.write(1, b"lost")
        outlet.write(1, b"too")
        os.dup2(write, 1)
        outlet.write(1, b"kept")
        assert os.read(read, 100) == b"kept"
        os.close(read)
        outlet.write(1, b"for nobody")
    finally:
        os.dup2(before, 1)
    assert outlet.reader_gone and outlet.lost == 7 and outlet.code() == 128 + signal.SIGPIPE
    assert capfd.readouterr().err.count("can't be written") == 1


def test_a_descriptor_that_does_not_block_is_waited_for():
    read, write = os.pipe()
    os.set_blocking(write, False)
    reader = subprocess.Popen(["sh", "-c", "sleep 0.2; wc -c"], stdin=read, stdout=subprocess.PIPE)
    os.close(read)
    write_all(write, bytes(1 << 20))
    os.close(write)
    assert int(reader.communicate(timeout=10)[0]) == 1 << 20


# ---- the other commands

SAY = ["import sys; from unshard.streams import command", "@command('a command')", "def main():", "    print('x' * 100)", "    return 3",
       "sys.exit(main())"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_tells_what_became_of_its_output(here, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = [sys.executable, "-c", "\n".join(SAY)]
    done = run(words, ">/dev/full")
    assert (done.returncode, done.stderr) == (1, "a command: error: the output can't be written: No space left on device\n")
    assert (run(words, ">/dev/full 2>/dev/full").returncode, run(words, ">&-").returncode, run(words, "").returncode) == (1, 3, 3)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(words, env=environment(), stdout=write, stderr=subprocess.PIPE, timeout=20)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("flag", ["--run-dir", "--timeline", "--enable_each_rank_log"])
def test_a_folder_that_cannot_be_used_is_refused_at_the_start(here, flag):
    done = run(command(f"{flag}=/proc/x", script(here, "print('started')")), "")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert f"error: {flag}=/proc/x: the folder can't be made" in done.stderr
    done = run(command(f"{flag}=/proc", "train.py"), "")
    assert (done.returncode, done.stdout) == (2, "") and f"error: {flag}=/proc: nothing can be written there" in done.stderr
