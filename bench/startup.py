"""Start-up: startup.py import MODULE | initialize MODULE; prints one JSON line.

`import`: seconds that importing MODULE and loading its engine takes after `import torch`. `initialize`: seconds of the first initialize()
of a small model on one rank, and of the first step.
"""
import json
import os
import sys
import time

import torch

what, name = sys.argv[1:]
begin = time.perf_counter()
module = __import__(name)
_ = module.initialize                          # Unshard loads its library with the first name that is used
result = {"module": name, "import_s": time.perf_counter() - begin}
if what == "initialize":
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    model = torch.nn.Linear(64, 64)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "zero_optimization": {"stage": 3}, "steps_per_print": 10**9}
    begin = time.perf_counter()
    engine, *_ = module.initialize(model=model, model_parameters=model.parameters(), config=config)
    result["initialize_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    engine.backward(engine(torch.ones(1, 64)).pow(2).mean())
    engine.step()
    result["first_step_s"] = time.perf_counter() - begin
print("RESULT " + json.dumps(result), flush=True)
