"""Every attack of touch_cases.py at world 1, on two ranks in shared memory, and on two ranks whose memory isn't shared."""
import functools
import traceback

import pytest
import touch_cases
from ranks import run_ranks

WORLDS = {"alone": (1, {}), "shared": (2, {}), "unshared": (2, {"UNSHARD_SHARE_MEMORY": "off"})}


def run_cases(rank, world, names):
    import torch
    results = {}
    for name in names:
        try:
            torch.manual_seed(0)
            touch_cases.all_cases()[name]()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()[-1500:]
            if world > 1:                                   # peers may wait for a call that won't come: end the run here
                break
        finally:
            import unshard
            unshard.destroy_all()
    return results


@functools.cache
def outcome(kind, name):
    world, env = WORLDS[kind]
    return run_ranks(world, run_cases, [name], limit=120, env=env)


@functools.cache
def together(kind):
    """All cases in one run (start-up costs more than a case); falls back to one run a case when that run doesn't end well."""
    world, env = WORLDS[kind]
    try:
        return run_ranks(world, run_cases, list(touch_cases.all_cases()), limit=300, env=env)
    except AssertionError:
        return None


@pytest.mark.parametrize("name", list(touch_cases.all_cases()))
@pytest.mark.parametrize("kind", list(WORLDS))
def test_touch(kind, name):
    results = together(kind)
    if results is None or any(name not in r for r in results):
        results = outcome(kind, name)
    for rank, result in enumerate(results):
        assert result[name] == "", f"rank {rank}: {result[name]}"
