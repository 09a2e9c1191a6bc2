"""The end of a script: exit status 0, whatever torch's threads are doing."""
import subprocess
import sys
import tempfile

import pytest
from ranks import free_port, rank_env

OURS = "import unshard; unshard.init_distributed()"
TORCHS = "import torch.distributed as dist; dist.init_process_group('gloo'); import unshard"

# A step of one of torch's optimizers imports torch._dynamo, and with it functions whose default argument is the group there is then. The
# interpreter's lock is handed over only where a thread gives it up, so a thread that asks for it late never gets it before the end.
SCRIPT = """
import os, sys, torch
{start}
import torch.distributed as dist
model = torch.nn.Linear(8, 8)
engine, *_ = unshard.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()),
                                config={{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": {stage}}}}})
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
sys.setswitchinterval(30)
for thread in os.listdir("/proc/self/task"):
    if "gloo_runloop" in open(f"/proc/self/task/{{thread}}/comm").read():
        os.sched_setaffinity(int(thread), {{min(os.sched_getaffinity(0))}})
        os.setpriority(os.PRIO_PROCESS, int(thread), 15)
values = [None] * dist.get_world_size()
for _ in range(20):
    dist.all_gather_object(values, {{"rank": dist.get_rank()}})
dist.barrier()
{end}
"""


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "", "engine.destroy()"], ids=["destroyed", "left", "engine destroyed"])
@pytest.mark.parametrize("start", [OURS, TORCHS], ids=["ours", "torch's"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_script_ends_well_right_after_a_collective_of_its_own(stage, start, end):
    port = free_port()
    command = [sys.executable, "-c", SCRIPT.format(stage=stage, start=start, end=end)]
    with tempfile.TemporaryFile() as log:
        ranks = [subprocess.Popen(command, env=rank_env(rank, 2, port), stdout=log, stderr=log, start_new_session=True)
                 for rank in range(2)]
        try:
            codes = [rank.wait(timeout=60) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        log.seek(0)
        assert codes == [0, 0], log.read().decode()
