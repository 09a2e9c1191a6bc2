"""The launcher across hosts: namespaces with real sshds (hosts.py), the launcher in worker-1's. Only the training needs the engine."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from hosts import Hosts
from launching import RANK_VARIABLES

PYTHON_DIR = pathlib.Path(__file__).resolve().parents[2] / "python"
WORDS = ["two words", "", "quote\"s and 'these'", "$HOME ${local_rank} $$ `id`", "a;b|c&d!", "a\nb", "back\\slash", "--flag=x y", "é", "*"]


@pytest.fixture(scope="module")
def pair():
    with Hosts(2, mbit=1000) as hosts:
        yield hosts


@pytest.fixture
def job(pair, tmp_path):
    job = Job(pair, tmp_path)
    yield job
    left = job.strangers_within(5)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left on the hosts"


class Job:
    """Runs launchers on the hosts, in one folder that all of them see."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        self.env.update(HOME=str(folder), PYTHONPATH=str(PYTHON_DIR), PYTHONDONTWRITEBYTECODE="1")

    def script(self, text, name="train.py"):
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def hostfile(self, slots=1):
        return "--hostfile=" + self.hosts.hostfile(self.folder / "my_hostfile", slots)

    def words(self, *arguments):
        return [sys.executable, "-m", "unshard.launcher", *arguments]

    def run(self, *arguments, on=0, **options):
        return self.hosts.run(on, self.words(*arguments), cwd=self.folder, env=self.env, timeout=50, **options)

    def start(self, *arguments, on=0):
        with open(self.folder / f"said{on}", "wb") as said:
            return self.hosts.popen(on, self.words(*arguments), cwd=self.folder, env=self.env, stdout=said, stderr=said)

    def said(self, on=0):
        return (self.folder / f"said{on}").read_text()

    def await_files(self, *names, limit=30):
        end = time.monotonic() + limit
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"{names}: not all came\n{self.said()}"
            time.sleep(0.02)

    def got(self, rank):
        return json.loads((self.folder / f"got{rank}.json").read_text())

    def strangers_within(self, seconds):
        """Processes still on the hosts when that time is up."""
        end = time.monotonic() + seconds
        while self.hosts.strangers() and time.monotonic() < end:
            time.sleep(0.05)
        return self.hosts.strangers()


WRITE_WHAT_I_GOT = """
    import json, os, socket, sys
    print("I am", os.environ["RANK"])
    with open(f"got{os.environ['RANK']}.json", "w") as file:
        json.dump({"env": dict(os.environ), "argv": sys.argv[1:], "host": socket.gethostname()}, file)
"""

# Every rank has a child; "stubborn" ones ignore SIGTERM. Rank 1 fails if told to, the others never do.
FAMILY = """
    import os, signal, subprocess, sys, time
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = os.environ["RANK"]
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], start_new_session=True)
    open(f"ready{rank}", "w").close()
    while rank != "1" or sys.argv[-1] != "fail" or not os.path.exists("ready0"):
        time.sleep(0.01)
    with open("failed_at", "w") as file:
        file.write(str(time.time()))
    print("the real cause", file=sys.stderr)
    os._exit(7)
"""


def test_what_the_ranks_of_two_hosts_get(job):
    """Example 7 of the mission with uneven slots, hard arguments and an environment file."""
    (job.folder / ".deepspeed_env").write_text("# for every rank\n\nGREETING=hello there, $HOME\n")
    done = job.run(job.hostfile([1, 2]), "--num_nodes=2", job.script(WRITE_WHAT_I_GOT), "--deepspeed_config", "ds_config.json", *WORDS)
    assert done.returncode == 0, done.stderr
    for rank, (host, local, size) in enumerate([("worker-1", 0, 1), ("worker-2", 0, 2), ("worker-2", 1, 2)]):
        got = job.got(rank)
        assert got["argv"] == [f"--local_rank={local}", "--deepspeed_config", "ds_config.json", *WORDS]
        assert got["host"] == host
        want = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": "3", "LOCAL_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                "CROSS_RANK": host[-1:].translate({49: "0", 50: "1"}), "CROSS_SIZE": "2", "MASTER_ADDR": job.hosts.address(0),
                "GLOO_SOCKET_IFNAME": "eth0", "GREETING": "hello there, $HOME", "UNSHARD_RESTART_COUNT": "0"}
        assert {key: got["env"].get(key) for key in want} == want
        assert got["env"]["MASTER_PORT"] == job.got(0)["env"]["MASTER_PORT"]
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] I am {rank}" for rank in range(3)]
    assert "3 ranks on 2 hosts, rank 0 at 10.77.0.1" in done.stderr and "worker-2: ranks 1-2 on slots 0, 1" in done.stderr


def test_ranks_talk_and_the_store_outlives_the_first_host(job):
    done = job.run(job.hostfile(), job.script("""
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        print("sum", total.item())
        if dist.get_rank() == 1:
            time.sleep(1)                         # by now rank 0 has ended
            store = dist.distributed_c10d._get_default_store()
            store.set("late", "word")
            print("store says", store.get("late").decode())
        os._exit(0)
    """))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2 and "[rank 1] store says word" in done.stdout


def test_a_failure_ends_all_hosts_within_5_seconds(job):
    done = job.run(job.hostfile(), job.script(FAMILY), "stubborn", "fail")
    assert time.time() - float((job.folder / "failed_at").read_text()) < 5.5
    assert done.returncode == 7, done.stderr
    assert "rank 1 on worker-2 failed with exit code 7" in done.stderr and "  | the real cause" in done.stderr
    assert not job.hosts.strangers()


def test_the_first_failing_ranks_words_come_first(job):
    done = job.run(job.hostfile(), job.script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            open("gone", "w").close()
            sys.exit("the real cause")
        while not os.path.exists("gone"):
            time.sleep(0.002)
        time.sleep(0.1)                           # as long as it takes to see that a connection broke
        sys.exit("a peer is gone")
    """))
    report = done.stderr.index("rank 1 on worker-2 failed with exit code 1")
    assert "the real cause" in done.stderr[report:] and "a peer is gone" not in done.stderr[:report]


def test_ctrl_c_ends_all_hosts(job):
    process = job.start(job.hostfile(), job.script(FAMILY), "stubborn")
    job.await_files("ready0", "ready1")
    process.send_signal(signal.SIGINT)
    assert process.wait(5.5) == 130
    assert "SIGINT: all ranks were ended" in job.said()
    assert not job.hosts.strangers()


def test_the_hosts_notice_a_killed_launcher(job):
    process = job.start(job.hostfile(), job.script(FAMILY))
    job.await_files("ready0", "ready1")
    process.kill()
    process.wait()
    assert not job.strangers_within(5.5)


def test_the_hosts_notice_a_killed_connection(job):
    process = job.start(job.hostfile(), job.script(FAMILY))
    job.await_files("ready0", "ready1")
    (ssh,) = [pid for pid in job.hosts.strangers(0) if pathlib.Path(f"/proc/{pid}/comm").read_text() == "ssh\n"]
    os.kill(ssh, signal.SIGKILL)
    assert process.wait(6) == 1
    assert "worker-2 is lost" in job.said()
    assert not job.strangers_within(1)


def test_a_host_whose_network_is_cut_is_named(job):
    process = job.start(job.hostfile([1, 2]), job.script("""
        import os, sys, time
        open(f"ready{os.environ['RANK']}", "w").close()
        while not os.path.exists("cut"):
            time.sleep(0.01)
        sys.exit(3) if os.environ["RANK"] == "0" else time.sleep(60)
    """))
    job.await_files("ready0", "ready1", "ready2")
    job.hosts.run(1, ["ip", "link", "set", "eth0", "down"])
    try:
        (job.folder / "cut").touch()
        assert process.wait(8) == 3
        said = job.said()
        assert re.search(r"rank 0 on worker-1 failed with exit code 3 after [\d.]+ s, before any other$", said, re.MULTILINE), said
        assert "worker-2 is lost: no answer within 5 s" in said
        assert "rank 1, 2 on worker-2 couldn't be ended from here, and may still run there" in said
        assert len(job.hosts.strangers(1)) > 2                   # as it says
    finally:
        job.hosts.run(1, ["ip", "link", "set", "eth0", "up"])
        for pid in job.hosts.strangers(1):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    assert not job.strangers_within(5)


def test_a_reader_that_goes_ends_all_hosts_quietly(job):
    name = job.script("""
        import time
        while True:
            print("x" * 1000)
    """)
    process = job.hosts.popen(0, job.words("--quiet", job.hostfile(), name), cwd=job.folder, env=job.env, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait(10) == 128 + signal.SIGPIPE, said
    assert not [line for line in said.splitlines() if "socket.cpp" not in line], said
    assert not job.strangers_within(1)


def test_no_ssh_a_reader_that_goes_on_one_host_ends_all(job):
    name = job.script("""
        import os, time
        while os.environ["RANK"] == "0":
            time.sleep(1)
        while True:
            print("x" * 1000)
    """)
    common = ["--no_ssh", job.hostfile(), "--master_port=29560", name]
    first = job.start("--node_rank=0", *common)
    other = job.hosts.popen(1, job.words("--node_rank=1", *common), cwd=job.folder, env=job.env, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL)
    other.stdout.readline()
    other.stdout.close()
    assert (other.wait(10), first.wait(10)) == (128 + signal.SIGPIPE, 128 + signal.SIGPIPE)
    assert "SIGPIPE: all ranks were ended" in job.said()
    assert not job.strangers_within(1)


def test_a_folder_that_a_host_cannot_make(job):
    done = job.run(job.hostfile(), "--run-dir=/proc/x", job.script(WRITE_WHAT_I_GOT))
    assert done.returncode == 2 and "error: worker-1: --run-dir=/proc/x: the folder can't be made" in done.stderr
    assert not (job.folder / "got0.json").exists()


def test_a_host_that_cannot_be_reached(job):
    begin = time.monotonic()
    done = job.run(job.hostfile(), "--ssh_port=2222", "--force_multi", job.script(WRITE_WHAT_I_GOT))
    assert done.returncode == 2 and time.monotonic() - begin < 5
    assert all(f"{host}: can't be reached" in done.stderr for host in job.hosts.names) and "refused" in done.stderr
    assert not (job.folder / "got0.json").exists()


def test_another_version_stops_before_any_rank(job):
    other = job.folder / "other"
    shutil.copytree(PYTHON_DIR / "unshard", other / "unshard", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    init = other / "unshard" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    job.script(f'[ "$(hostname)" = worker-1 ] || export PYTHONPATH={other}\n', "activate")
    done = job.run(job.hostfile(), "--venv_script=activate", job.script(WRITE_WHAT_I_GOT))
    assert done.returncode == 2
    assert "error: worker-2 has unshard 9." in done.stderr
    assert not (job.folder / "got0.json").exists()


def test_mistakes_only_a_host_can_see(job):
    done = job.run(job.hostfile(), "missing.py")
    assert done.returncode == 2 and "there is no script 'missing.py'" in done.stderr


def test_include_leaves_one_remote_host_that_greets(job):
    job.script("echo Welcome to this host.\n", "activate")
    done = job.run(job.hostfile(2), "--include=worker-2:1", "--venv_script=activate", job.script(WRITE_WHAT_I_GOT))
    assert done.returncode == 0, done.stderr
    assert "[worker-2] Welcome to this host." in done.stderr and done.stdout == "I am 0\n"
    assert (job.got(0)["host"], job.got(0)["env"]["WORLD_SIZE"]) == ("worker-2", "1")


def test_restarts_resume_from_the_newest_checkpoint(job):
    name = job.script("""
        import os, sys
        rank, newest = os.environ["RANK"], -1
        for file in os.listdir("."):
            if file.startswith(f"step-{rank}-"):
                newest = max(newest, int(file.rpartition("-")[2]))
        for step in range(newest + 1, 4):
            print("step", step, flush=True)
            open(f"step-{rank}-{step}", "w").close()
            if step == 1 and rank == "1" and os.environ["UNSHARD_RESTART_COUNT"] == "0":
                sys.exit(9)
        while not all(os.path.exists(f"step-{r}-3") for r in range(2)):
            pass
    """)
    done = job.run(job.hostfile(), "--max-restarts=1", name)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("[rank 1]")] == [f"[rank 1] step {step}" for step in range(4)]
    assert "rank 1 on worker-2 failed with exit code 9" in done.stderr and "restart 1 of 1" in done.stderr


TRAIN = """
    import os, signal, sys
    import torch
    import unshard
    folder, fails = sys.argv[-2:]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
              "zero_optimization": {"stage": 3}}
    engine, *_ = unshard.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.load_checkpoint(folder)
    print("from step", engine.global_steps, flush=True)
    for step in range(engine.global_steps, 6):
        torch.manual_seed(100 * step + int(os.environ["RANK"]))
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
        if step % 2:
            engine.save_checkpoint(folder)
        if step == 4 and fails == "fails" and os.environ["RANK"] == "1" and os.environ["UNSHARD_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save(engine.module.state_dict(), f"weights-{folder}-{os.environ['RANK']}")
    engine.destroy()
"""


def test_restarted_training_ends_with_the_weights_of_an_unbroken_run(job):
    """ZeRO-3 on two hosts, rank 1 killed in step 4; checkpoints are of steps 2, 4, 6."""
    del job.env["PYTHONPATH"]                       # the engine, where this Python has it
    name = job.script(TRAIN)
    broken = job.run(job.hostfile(), "--max-restarts=1", name, "broken", "fails")
    assert broken.returncode == 0, broken.stderr
    assert re.findall(r"from step \d", broken.stdout) == 2 * ["from step 0"] + 2 * ["from step 4"]
    whole = job.run(job.hostfile(), name, "whole", "stands")
    assert whole.returncode == 0, whole.stderr
    states = [[torch.load(job.folder / f"weights-{folder}-{rank}") for rank in range(2)] for folder in ("broken", "whole")]
    for key, value in states[1][0].items():
        assert all(torch.equal(state[key], value) for pair in states for state in pair), key


def test_no_ssh(job):
    """The command is given on each host; each shows its own ranks."""
    name = job.script(WRITE_WHAT_I_GOT)
    common = ["--no_ssh", "--num_nodes=2", "--num_gpus=1", "--master_addr=worker-1", "--master_port=29555", name, *WORDS]
    other = job.start("--node_rank=1", *common, on=1)
    done = job.run("--node_rank=0", *common)
    assert done.returncode == 0, done.stderr
    assert other.wait(10) == 0
    assert [job.got(rank)["host"] for rank in range(2)] == ["worker-1", "worker-2"]
    assert job.got(1)["argv"] == ["--local_rank=0", *WORDS]
    assert "[rank 1] I am 1" in job.said(1) and "I am 1" not in done.stdout


def test_no_ssh_failures_and_restarts_reach_all(job):
    name = job.script("""
        import os, sys, time
        attempt = os.environ["UNSHARD_RESTART_COUNT"]
        open(f"attempt{attempt}-{os.environ['RANK']}", "w").close()
        if os.environ["RANK"] == "0":
            time.sleep(60)
        sys.exit(5)
    """)
    common = ["--no_ssh", "--max-restarts=1", job.hostfile(), "--master_port=29556", name]
    other = job.start("--node_rank=1", *common, on=1)
    done = job.run("--node_rank=0", *common)
    assert done.returncode == 5 and other.wait(10) == 5, done.stderr
    assert {path.name for path in job.folder.glob("attempt*")} >= {"attempt0-1", "attempt1-1"}
    assert "rank 1 on worker-2 failed with exit code 5" in done.stderr


def test_pdsh_starts_a_meeting(job):
    """A stand-in that does what pdsh does with these arguments: the command, here, for each host, with its name and number put in."""
    tools = job.folder / "tools"
    tools.mkdir()
    job.script(f"""\
        #!{sys.executable}
        import getpass, os, subprocess, sys
        assert sys.argv[1:5] == ["-S", "-f", "1024", "-w"] and os.environ["PDSH_RCMD_TYPE"] == "exec"
        names = [{{"%h": host, "%n": str(n), "%u": getpass.getuser()}} for n, host in enumerate(sys.argv[5].split(","))]
        commands = [[name.get(word, word) for word in sys.argv[6:]] for name in names]
        started = [subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) for words in commands]
        sys.exit(max(process.wait() for process in started))
    """, "tools/pdsh")
    (tools / "pdsh").chmod(0o755)
    job.env["PATH"] = f"{tools}:{job.env['PATH']}"
    done = job.run(job.hostfile(), "--launcher=pdsh", "--master_port=29557", job.script(WRITE_WHAT_I_GOT), *WORDS)
    assert done.returncode == 0, done.stderr
    assert [job.got(rank)["host"] for rank in range(2)] == ["worker-1", "worker-2"]
    assert job.got(1)["argv"] == ["--local_rank=0", *WORDS]
    process = job.start(job.hostfile(), "--launcher=pdsh", "--master_port=29558", job.script(FAMILY))
    job.await_files("ready0", "ready1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(6) == 128 + signal.SIGTERM, job.said()
    assert not job.strangers_within(1)


# ---- what would be started, without starting it

def dry_run(job, *arguments):
    done = job.run("--dry-run", *arguments, job.script(""), "a b")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dry_run_shows_the_commands(job):
    text = dry_run(job, job.hostfile(8), "--num_gpus=4", "--ssh_port=2200", "--launcher_args=-F config")
    assert "2 hosts, 8 ranks" in text and "worker-2: ranks 4-7 on slots 0-3" in text and "train.py --local_rank=N 'a b'" in text
    assert re.search(r"command for worker-1: \S*python\S* -m unshard.launcher.node", text)              # this machine needs no ssh
    assert "-p 2200 -F config -- worker-2 'exec env PYTHONPATH=" in text
    assert "-- worker-1" not in text and "-- worker-1 'exec env" in dry_run(job, job.hostfile(), "--force_multi")
    assert "pdsh -S -f 1024 -w worker-1,worker-2 " in dry_run(job, job.hostfile(), "--launcher=pdsh")
    assert "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=worker-2" in dry_run(job, job.hostfile(), "--launcher=slurm",
                                                                                        "--exclude=worker-1")
    assert "mpirun -n 2 --map-by ppr:1:node --bind-to none --host worker-1:1,worker-2:1" in dry_run(job, job.hostfile(),
                                                                                                    "--launcher=openmpi")
    assert not job.hosts.strangers()
