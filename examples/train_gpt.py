"""Train a byte-level GPT of about 10M parameters on real text with Unshard, from a DeepSpeed JSON.

    unshard run --num_gpus=2 examples/train_gpt.py --config examples/configs/zero3.json
    python examples/train_gpt.py --config examples/configs/zero3.json        # one rank, no launcher

The text is the sources of Python's standard library, or what --text names. Model, data and loop are plain PyTorch; Unshard is the call of
`initialize` and the three calls on the engine. Shapes in names: B batch, T time, D width.
"""
import argparse
import json
import pathlib
import sysconfig
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
import unshard
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD):
        batch, time_, width = x_BTD.shape
        q, k, v = (part.view(batch, time_, self.heads, -1).transpose(1, 2) for part in self.qkv(self.attention_norm(x_BTD)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.attention_out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))


class GPT(nn.Module):
    def __init__(self, layers=6, heads=6, width=384, context=128, vocabulary=256):
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT):
        x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))

    @torch.no_grad()
    def generate(self, prompt, length, temperature=0.7):
        """`prompt` and `length` more bytes, each drawn from the 20 likeliest."""
        device, text = self.tokens.weight.device, list(prompt)
        for _ in range(length):
            logits = self(torch.tensor([text[-self.context:]], device=device))[0, -1].float()
            values, choices = logits.topk(20)
            text.append(int(choices[torch.multinomial(torch.softmax(values / temperature, -1), 1)]))
        return bytes(text)


def read_text(path):
    """One file, or all Python files below a folder, as a tensor of bytes."""
    path = pathlib.Path(path)
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def windows(text, size, context, rank):
    """Endless (tokens, targets); every rank draws its own places."""
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        starts = torch.randint(len(text) - context - 1, (size,), generator=generator)
        rows = torch.stack([text[start:start + context + 1] for start in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def process_mb():
    """Memory of this process with shared pages counted in shares (PSS)."""
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def mean_over_ranks(value):
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Progress:
    """A line every few steps on rank 0, and the record that is written at the end."""

    def __init__(self, engine, steps, every, tokens_per_step):
        self.engine, self.steps, self.every, self.tokens_per_step = engine, steps, every, tokens_per_step
        self.losses, self.step_s, self.mb = [], [], 0.0
        self.last = time.perf_counter()

    def before_update(self, step):
        if step % self.every == 0 or step == self.steps:      # gradients, states and weights are all here now
            self.mb = max(self.mb, process_mb())

    def after_update(self, step, loss):
        now = time.perf_counter()
        self.step_s.append(now - self.last)
        self.losses.append(mean_over_ranks(loss))
        if dist.get_rank() == 0 and (step == 1 or step % self.every == 0 or step == self.steps):
            recent = self.step_s[-self.every:]
            seconds = sum(recent) / len(recent)
            left = round((self.steps - step) * seconds)
            print(f"step {step:4}/{self.steps}  loss {self.losses[-1]:.4f}  {self.tokens_per_step / seconds:7,.0f} tokens/s  "
                  f"memory/rank {self.mb or process_mb():.0f} MB  ETA {left // 60}:{left % 60:02}", flush=True)
        self.last = time.perf_counter()

    def record(self, stage):
        """What every rank held and how long its steps took; the first steps are warm-up."""
        mine = {"states_mb": {kind: size / 2**20 for kind, size in self.engine.memory_report().items()}, "process_mb": self.mb,
                "step_ms": sorted(self.step_s[2:] or self.step_s)[len(self.step_s[2:] or self.step_s) // 2] * 1e3}
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        return {"stage": stage, "losses": self.losses, "ranks": ranks}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/configs/zero3.json", help="DeepSpeed JSON")
    parser.add_argument("--text", default=sysconfig.get_paths()["stdlib"], help="a file, or a folder of Python sources")
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--report-every", type=int, default=5)
    parser.add_argument("--sample", type=int, default=300, help="bytes of text that the model writes at the end")
    parser.add_argument("--out", default="", help="write losses, memory and times to this JSON file")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    torch.manual_seed(0)                                       # the same model on every rank
    model = GPT()
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine, _, _, _ = unshard.initialize(model=model, config=arguments.config)
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = engine.zero_optimization_stage()
    if rank == 0:
        print(f"{numel / 1e6:.1f}M parameters, ZeRO {stage}, {world} rank{'s' * (world > 1)}", flush=True)

    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    data = windows(read_text(arguments.text), micro, model.context, rank)
    progress = Progress(engine, arguments.steps, arguments.report_every, micro * accumulation * world * model.context)
    for step in range(1, arguments.steps + 1):
        total = 0.0
        for _ in range(accumulation):
            tokens, targets = (part.to(engine.device) for part in next(data))
            loss = F.cross_entropy(engine(tokens).flatten(0, 1).float(), targets.flatten())
            engine.backward(loss)
            progress.before_update(step)
            engine.step()
            total += loss.item()
        progress.after_update(step, total / accumulation)

    record = progress.record(stage)
    if rank == 0:
        print(f"loss {record['losses'][0]:.4f} -> {record['losses'][-1]:.4f}")
        if arguments.out:
            pathlib.Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(arguments.out).write_text(json.dumps(record) + "\n")
        if arguments.sample:                                   # rank 0 alone reads the whole model, partitioned or not
            print("--- the model writes:\n" + model.generate(b"def ", arguments.sample).decode(errors="replace") + "\n---", flush=True)
    dist.barrier()
    engine.destroy()


if __name__ == "__main__":
    main()
