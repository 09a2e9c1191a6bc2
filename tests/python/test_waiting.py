"""Ranks that wait in vain are told what is known, and no more; ranks that others wait for are quoted (waiting.py)."""
import re
import threading
import time

import pytest
import waiting
from hosts import Hosts
from pool import Pool, Zygote, Zygotes

PLACES = {"one host": 3, "two hosts": ["left", "right", "right"]}


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as zygote:
        yield zygote


def texts(outcomes):
    assert all(o.code == 0 for o in outcomes), [(o.rank, o.code, o.output[-2000:]) for o in outcomes]
    return [o.value[1] for o in outcomes]


def run(zygote, place, function, *args):
    with Pool(zygote, PLACES[place]) as pool:
        return pool.outcomes(function, *args, limit=40, after_failure=20)


@pytest.mark.parametrize(("hosts", "victim", "stage"), [([1, 2], 1, 3), ([2, 1, 1], 0, 2)])
def test_of_a_host_whose_link_is_cut_it_is_said_that_nothing_is_heard(hosts, victim, stage, tmp_path):
    with Hosts(len(hosts), ssh=False) as network, Zygotes(network) as zygotes, Pool.on_hosts(network, zygotes, hosts) as pool:
        def cut():
            while len(list(tmp_path.glob("up*"))) < sum(hosts):
                time.sleep(0.01)
            time.sleep(0.5)
            network.run(victim, ["ip", "link", "set", "eth0", "down"])

        threading.Thread(target=cut, daemon=True).start()
        said = texts(pool.outcomes(waiting.until_cut, stage, str(tmp_path), limit=60))
    host_of = [host for host, count in enumerate(hosts) for _ in range(count)]
    for rank, text in enumerate(said):
        assert text.startswith(("CommError: ", "RuntimeError: [zero.touch ")) and f"worker-{victim + 1}" in text, text    # or an operator's
        others = [other for other in range(len(said)) if (host_of[other] == victim) != (host_of[rank] == victim)]
        assert re.search("|".join(rf"no word from rank {other} \(host worker-{host_of[other] + 1}, 10\.77\.0\.\d\) for \d\.\d s"
                                  rf"|rank {other} (is gone|gives no sign of life)" for other in others), text), text
        for other in others:                        # they may well compute: nobody can know
            assert f"rank {other} waits for nobody" not in text, text
    if hosts == [2, 1, 1]:
        assert any(re.search(rf"rank {a}: waiting in step \d+, \[comm\.", said[b]) for a, b in ((2, 3), (3, 2))), said[2:]


@pytest.mark.parametrize("place", PLACES)
def test_engines_stepped_in_another_order_are_told_apart(zygote, place):
    said = texts(run(zygote, place, waiting.opposite_order))
    for rank, text in enumerate(said):
        other, group = (1, "world 1") if rank == 0 else (0, "world 0")
        assert re.search(rf"rank {other}: [^;]*waiting in [^;]*'engine.step'\] of another group, '{group}", text), text
        assert "every rank must call its engines in the same order" in text and "it computes" not in text, text


@pytest.mark.parametrize("place", PLACES)
def test_a_late_rank_is_shown_in_the_step_that_it_is_in(zygote, place):
    outcomes = run(zygote, place, waiting.late)
    here = "rank 1: idle, step 1, at 'after step'"
    for o in outcomes:
        assert "starting" not in o.output + str(o.value), (o.value, o.output[-2000:])
        if o.rank != 1:                             # whose time is up first tells the other; of a rank of another host less is known
            assert here in o.value[1] or place == "two hosts" and "rank 1 waits for nobody that is known" in o.value[1], o.value


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_in_a_step_is_told_to_all_at_once_and_once(zygote, place, stage):
    outcomes = run(zygote, place, waiting.interrupted, stage)
    said = texts(outcomes)
    assert said[0].startswith("KeyboardInterrupt"), said[0]
    for o in outcomes[1:]:
        assert re.search(r"rank 0( \(pid \d+\))? failed: KeyboardInterrupt", o.value[1]), o.value
        assert o.value[1].count("failed:") == 1 and "python_error" not in o.value[1], o.value
        assert o.value[0] < 4, o.value              # timeout_s is 8


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_init_is_quoted_to_the_ranks_that_wait(zygote, place):
    said = texts(run(zygote, place, waiting.raises_in_init))
    assert said[1] == "ValueError: no such layer"
    for text in (said[0], said[2]):
        assert re.search(r"rank 1( \(pid \d+\))? left the group after ValueError: no such layer", text), text
        assert "good order" not in text and text.count("no such layer") == 1, text
