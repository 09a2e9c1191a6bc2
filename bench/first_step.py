"""What a launcher starts for the time to the first step: first_step.py MODULE. Rank 0 says when a small GPT has taken a ZeRO-3 step."""
import sys

import torch
from gpt import GPT, batches

module = __import__(next(word for word in sys.argv[1:] if not word.startswith("-")))
torch.manual_seed(0)
model = GPT(layers=2, width=64, heads=2, vocab=512)
engine, *_ = module.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3},
    "steps_per_print": 10**9})
tokens, targets = next(batches(torch.distributed.get_rank(), torch.distributed.get_world_size(), 1, 256))
engine.backward(engine(tokens, targets))
engine.step()
if torch.distributed.get_rank() == 0:
    print("FIRST STEP", flush=True)
torch.distributed.barrier()
