"""Hosts whose own name means nothing, or a loopback address: ranks find the address that others reach, or say what to set."""
import pytest
import torch
from hosts import Hosts


def add_up(rank, world):
    import unshard
    from unshard import _core, distributed
    unshard.init_distributed()
    comm = distributed.make_communicator()
    mine = torch.full((1000,), rank + 1.0)
    comm.all_reduce(mine)
    theirs = torch.full((1000,), rank + 1.0)
    torch.distributed.all_reduce(theirs)
    return [mine[0].item(), theirs[0].item(), comm.hosts, _core.interface_for_gloo()]


@pytest.mark.parametrize("name", ["nameless", "worker-1"])
def test_ranks_meet_where_host_names_are_of_no_use(name):
    with Hosts(2, ssh=False) as hosts:
        if name == "nameless":
            for i in range(2):
                hosts.run(i, ["hostname", name])
        values = hosts.run_ranks([1, 2], add_up, limit=60, env={"GLOO_SOCKET_IFNAME": ""})
    assert [v[:3] for v in values] == [[6.0, 6.0, [0, 1, 1]]] * 3


def test_a_loopback_interface_asked_for_on_several_machines_is_an_error_that_says_what_to_set():
    with Hosts(2, ssh=False) as hosts:
        outcomes = hosts.run_ranks([1, 1], add_up, limit=60, expect_failure=True, env={"GLOO_SOCKET_IFNAME": "lo"})
    assert all(o.code not in (0, None) and "GLOO_SOCKET_IFNAME" in o.output for o in outcomes), [o.output[-1500:] for o in outcomes]
