"""Which ranks the launcher's options mean, and the mistakes it refuses."""
import os
import socket

import pytest
from launching import WRITE_WHAT_I_GOT, free_port, got, launch, plan_of, script
from unshard.launcher.agent import hold_store
from unshard.launcher.cores import parse_core_list, share_out
from unshard.launcher.errors import LaunchError
from unshard.launcher.hosts import parse_filter, read_hostfile, select
from unshard.launcher.options import build_parser
from unshard.launcher.plan import make_plan
from unshard.launcher.ports import choose_port


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
                       ("--no_ssh --launcher=PDSH", "--launcher=pdsh can't be used together"),
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


def test_a_port_that_is_taken_after_it_was_found_free_is_replaced_unless_it_was_asked_for(here):
    """Two jobs that start in the same second both find the default port free, and only one can have it."""
    plan, told = plan_of(script(here, "")), []
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        plan.master_port = asked = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match="address already in use"):
            hold_store(plan)
        store = hold_store(plan, told.append)
    assert told == [plan.master_port] == [store.port] and store.port != asked
    assert make_plan(build_parser("test").parse_args(["--master_port", str(free_port()), "train.py"]), lambda: 0).port_asked
    assert not make_plan(build_parser("test").parse_args(["train.py"]), lambda: 0).port_asked


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
