"""The hosts that tests are given (hosts.py) are what they claim: names, speed, delay, ranks on them, and nothing left behind."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
from hosts import Hosts

MEGABYTES = 12
SERVER = """
import socket
server = socket.create_server(("", 5000))
print("up", flush=True)
line, _ = server.accept()
while data := line.recv(1 << 20):
    if len(data) == 1:
        line.sendall(data)
"""
CLIENT = f"""
import json, socket, time
line = socket.create_connection(("worker-1", 5000))
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(9):
    begin = time.perf_counter()
    line.sendall(b"x")
    line.recv(1)
    trips.append(time.perf_counter() - begin)
begin = time.perf_counter()
line.sendall(bytes({MEGABYTES} << 20))
line.shutdown(socket.SHUT_WR)
line.recv(1)                                   # the other side closes when it has it all
print(json.dumps([min(trips), time.perf_counter() - begin]))
"""


def measure(hosts):
    """(shortest round trip, seconds for MEGABYTES from worker-2 to worker-1)"""
    with hosts.popen(0, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"up\n"
        done = hosts.run(1, [sys.executable, "-c", CLIENT])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.mark.parametrize("delay_ms", [0, 2])
def test_speed_and_delay(delay_ms):
    with Hosts(2, mbit=200, delay_ms=delay_ms, ssh=False) as hosts:
        round_trip, seconds = measure(hosts)
    assert round_trip >= 2 * delay_ms / 1000
    assert round_trip < 2 * delay_ms / 1000 + 0.02
    least = (MEGABYTES << 20) * 8 / 200e6
    assert 0.9 * least < seconds < 8 * least         # the first burst is free; the machine may be busy


def test_names_and_ends():
    with Hosts(3) as hosts:
        assert [hosts.run(i, ["hostname"]).stdout for i in range(3)] == ["worker-1\n", "worker-2\n", "worker-3\n"]
        done = hosts.run(2, ["ssh", "worker-1", "hostname"])
        assert done.stdout == "worker-1\n", done.stderr
        left = hosts.popen(1, ["sh", "-c", "echo in; exec sleep 100"], stdout=subprocess.PIPE)
        assert left.stdout.readline() == b"in\n"
        assert hosts.strangers(1) == [left.pid] and not hosts.strangers(0)
        everything = hosts.processes()
    with left:
        assert left.wait(5) != 0
    assert not [pid for pid in everything if os.path.exists(f"/proc/{pid}") and pathlib.Path(f"/proc/{pid}/comm").read_text() == "sshd\n"]


def test_nothing_is_left_after_a_failure():
    with pytest.raises(ZeroDivisionError):
        with Hosts(2) as hosts:
            left = hosts.popen(0, ["sleep", "100"])
            raise ZeroDivisionError
    assert left.wait(5) != 0 and not hosts.processes()


def add_up(rank, world, number):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([number * (rank + 1.0)])
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()                   # torch's threads may abort a process that ends without
    return [total.item(), int(os.environ["LOCAL_RANK"]), os.uname().nodename]


def fail_on_one(rank, world):
    if rank == 1:
        raise RuntimeError("rank 1 can't")


def test_ranks_on_hosts():
    with Hosts(2, mbit=1000, ssh=False) as hosts:
        assert hosts.run_ranks([2, 1], add_up, 10, limit=60) == [[60.0, 0, "worker-1"], [60.0, 1, "worker-1"], [60.0, 0, "worker-2"]]
        outcomes = hosts.run_ranks([1, 1], fail_on_one, limit=30, expect_failure=True)
        assert [outcome.code for outcome in outcomes] == [0, 1] and "rank 1 can't" in outcomes[1].output
