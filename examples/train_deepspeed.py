"""A DeepSpeed training loop as its users write it, run unchanged by Unshard's drop-in module `deepspeed`.

    deepspeed --num_gpus=2 examples/train_deepspeed.py
"""
import argparse
import pathlib

import deepspeed
import torch

CONFIG = pathlib.Path(__file__).parent / "configs" / "zero2.json"


class MyLargeModel(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))


def batches(rank, size, steps):
    """y = Wx for a fixed W; every rank has data of its own."""
    weight = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) / 8
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        data = torch.randn(size, 64, generator=generator)
        yield data, data @ weight


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=300)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = MyLargeModel()
    criterion = torch.nn.MSELoss()

    engine, optimizer, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        config=str(CONFIG)
    )
    dataloader = batches(engine.global_rank, engine.train_micro_batch_size_per_gpu(), args.steps)
    for step, (data, target) in enumerate(dataloader):
        data = data.to(engine.device)
        target = target.to(engine.device)
        outputs = engine(data)
        loss = criterion(outputs, target)
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and step % 30 == 0:
            print(f"step {step}: loss {loss.item():.4f}, lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)


if __name__ == "__main__":
    main()
