"""A DeepSpeed training script as anyone has it, run as it is by Unshard's drop-in module `deepspeed`.

    deepspeed --num_gpus=2 examples/train_deepspeed.py --deepspeed_config examples/configs/2-zero2.json
"""
import argparse

import deepspeed
import torch


class Regression(torch.utils.data.Dataset):
    """y = Wx for a fixed W."""

    def __init__(self, rows=512, width=64):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, width, generator=generator)
        self.y = self.x @ torch.randn(width, 8, generator=generator) / width**0.5

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=10)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, optimizer, loader, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, model_parameters=model.parameters(),
                                                        training_data=Regression())
    criterion = torch.nn.MSELoss()
    dtype = next(model.parameters()).dtype
    for epoch in range(args.epochs):
        total = 0.0
        for data, target in loader:
            outputs = engine(data.to(engine.device, dtype))
            loss = criterion(outputs.float(), target.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.item()
        if engine.global_rank == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)


if __name__ == "__main__":
    main()
