"""Ranks that go different ways compute what one dense process computes: random programs (divergence.py), each within its time limit."""
import copy
import os

import divergence
import pytest
from pool import Pool, Zygote

PLACEMENTS = {"one_host": ["left", "left"], "two_hosts": ["left", "right"], "three_and_one": ["left", "left", "left", "right"],
              "uneven": ["left", "left", "right"], "three_hosts": ["left", "right", "middle"], "pairs": ["left", "left", "right", "right"],
              "mixed": ["left", "right", "left", "middle"], "four": ["left"] * 4, "unshared": ["left", "left", "left"]}
UNSHARED = {"UNSHARD_SHARE_MEMORY": "off"}
LIMIT_S = 20
PROGRAMS = 12 * max(1, int(os.environ.get("UNSHARD_SOAK", "1")))          # a placement; UNSHARD_SOAK=10 makes over 1,000 in all
FIRST_SEED = int(os.environ.get("UNSHARD_SEED", "1"))


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as zygote:
        yield zygote


def why_not(pool, program):
    """None, or what is wrong with the program's run. After a failure of ranks (not of numbers) the pool is of no more use."""
    outcomes = pool.outcomes(divergence.run, program, limit=LIMIT_S, after_failure=LIMIT_S)
    bad = [o for o in outcomes if o.code != 0]
    if bad:
        ends = [f"at no end after {LIMIT_S} s" if o.code is None else f"ended with {o.code}" for o in bad]
        return "\n".join(f"rank {o.rank}: {end}\n{o.output[-1500:]}" for o, end in zip(bad, ends))
    found = divergence.differences(program, [o.value for o in outcomes])
    return "\n".join(found[:10]) or None


def in_a_pool_of_its_own(zygote, env):
    def fails(program):
        with Pool(zygote, program["hosts"], env) as pool:
            return why_not(pool, program) is not None
    return fails


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_random_programs_equal_a_dense_process(zygote, placement):
    hosts, env = PLACEMENTS[placement], UNSHARED if placement == "unshared" else {}
    with Pool(zygote, hosts, env) as pool:
        for seed in range(FIRST_SEED, FIRST_SEED + PROGRAMS):
            program = divergence.generate(f"{placement} {seed}", hosts)
            reason = why_not(pool, program)
            if reason:
                smaller = divergence.shrink(program, in_a_pool_of_its_own(zygote, env))
                with Pool(zygote, smaller["hosts"], env) as other:
                    again = why_not(other, smaller)
                pytest.fail(f"placement {placement}, seed {seed} (UNSHARD_SEED={seed}): {reason}\nshrunk to\n{divergence.text(smaller)}\n"
                            f"which gives: {again}", pytrace=False)


def test_a_wrong_gradient_is_found(zygote):
    program = divergence.generate("one_host 3", PLACEMENTS["one_host"])
    program["steps"][0]["micros"][0][1] = [{"do": "train", "path": [0], "input": 1, "way": "engine"}]
    other = copy.deepcopy(program)
    other["steps"][0]["micros"][0][1][0]["input"] = 2
    with Pool(zygote, program["hosts"]) as pool:
        values = pool.call(divergence.run, program, limit=LIMIT_S)
    assert not divergence.differences(program, values)
    assert any("weight" in line for line in divergence.differences(other, values))


def test_failing_programs_shrink_to_what_makes_them_fail():
    """A made-up fault: a rank raises in a forward in a step after one in which another rank trained by checkpointing."""
    def fails(program):
        trained = False
        for step in program["steps"]:
            operations = [(rank, one) for micro in step["micros"] for rank, of_rank in enumerate(micro) for one in of_rank]
            if trained and any(one["do"] == "raise" for _, one in operations):
                return True
            trained = trained or any(one.get("way") == "checkpoint" for _, one in operations)
        return False

    tried = 0
    for seed in range(400):
        program = divergence.generate(f"shrink {seed}", PLACEMENTS["four"])
        if fails(program):
            smaller, tried = divergence.shrink(program, fails), tried + 1
            operations = [one["do"] for step in smaller["steps"] for micro in step["micros"] for of_rank in micro for one in of_rank]
            assert sorted(operations) == ["raise", "train"] and len(smaller["steps"]) == 2 and len(smaller["hosts"]) == 2, smaller
            assert smaller["gas"] == 1 and not smaller["clip"]
    assert tried >= 5
