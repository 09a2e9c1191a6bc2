"""Makes the checkpoints beside it with the real DeepSpeed: PYTHON_WITH_DEEPSPEED make.py [--only VARIANT] [--out FOLDER]

Each variant is a tiny model (two groups, a tied weight, a frozen layer, a buffer), trained for a few steps by ranks that this script
starts, saved by DeepSpeed's save_checkpoint, and packed as VARIANT.tar.xz together with `expected.pt`: what DeepSpeed's own safe_get_full_*
functions and counters say. Recorded with deepspeed 0.19.8.
"""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).parent
# name: (stage, dtype, ranks, more)
VARIANTS = {
    "stage0-fp32": (0, "fp32", 2, {}),
    "stage0-fp16": (0, "fp16", 2, {}),
    "stage0-bf16": (0, "bf16", 2, {}),
    "stage1-fp32": (1, "fp32", 2, {}),
    "stage1-bf16": (1, "bf16", 2, {}),
    "stage1-bf16-fp32grads": (1, "bf16", 2, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage2-fp32": (2, "fp32", 3, {}),
    "stage2-fp16": (2, "fp16", 2, {}),
    "stage2-bf16": (2, "bf16", 1, {}),
    "stage2-offload": (2, "fp32", 2, {"offload": True}),
    "stage2-sgd": (2, "fp32", 2, {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}}),
    "stage3-fp32": (3, "fp32", 3, {}),
    "stage3-fp16": (3, "fp16", 2, {}),
    "stage3-bf16": (3, "bf16", 2, {}),
    "stage3-offload": (3, "fp32", 2, {"offload": True}),
    "stage3-subgroups": (3, "fp32", 2, {"sub_group_size": 5}),
    "stage3-nofrozen": (3, "fp32", 2, {"exclude_frozen": True}),
    "stage2-universal": (2, "fp32", 2, {"universal": True}),
    "stage3-universal": (3, "bf16", 2, {"universal": True}),
}
STEPS, MORE_STEPS = 4, 3


def config_of(stage, dtype, more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if more.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if "sub_group_size" in more:
        zero["sub_group_size"] = more["sub_group_size"]
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
              "optimizer": more.get("optimizer", {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}),
              "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if "data_types" in more:
        config["data_types"] = more["data_types"]
    if stage == 0 and dtype == "bf16":
        del zero["stage3_param_persistence_threshold"]
    return config


def model_and_groups():
    import torch

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(7, 5)
            self.frozen = torch.nn.Linear(5, 5)
            self.mid = torch.nn.Linear(5, 5)
            self.norm = torch.nn.LayerNorm(5)
            self.head = torch.nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.tensor([0.5, 1.5]))

        def forward(self, tokens, targets):
            x = self.embed(tokens)
            x = self.norm(self.mid(torch.tanh(self.frozen(x)))) + x
            return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())

    torch.manual_seed(7)
    model = Tiny()
    model.frozen.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]
    return model, groups


def train(variant, out):
    """One rank."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    get_accelerator().is_fp16_supported = lambda: True        # it computes in fp16 on a CPU all right
    stage, dtype, _, more = VARIANTS[variant]
    model, groups = model_and_groups()
    engine, optimizer, _, schedule = deepspeed.initialize(model=model, model_parameters=groups, config=config_of(stage, dtype, more))
    rank = engine.global_rank
    train_steps(engine, range(STEPS))
    if hasattr(optimizer, "_hp_optimizer_states_linked"):     # done after the first group's first step, when the others have no states yet
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    states = ["momentum_buffer"] if "optimizer" in more else ["exp_avg", "exp_avg_sq"]
    expected = {"fp32": {}, "frozen": {}, **{state: {} for state in states}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter]):
                expected["frozen"][name] = parameter.detach().clone()
            continue
        if stage > 0:
            expected["fp32"][name] = safe_get_full_fp32_param(parameter).clone()
            for state in states:
                expected[state][name] = safe_get_full_optimizer_state(parameter, state).clone()
        else:
            stage0(engine, parameter, name, expected, states)
    expected.update(global_steps=engine.global_steps, global_samples=engine.global_samples, skipped_steps=engine.skipped_steps,
                    buffers={k: v.clone() for k, v in model.named_buffers()}, lr_scheduler=schedule.state_dict(),
                    loss_scale=float(optimizer.cur_scale) if dtype == "fp16" and hasattr(optimizer, "cur_scale") else None)
    engine.save_checkpoint(out, client_state={"epoch": 2, "note": "mine", "seen": [1, 2, (3,)]},
                           exclude_frozen_parameters=bool(more.get("exclude_frozen")))
    # And how it goes on from here.
    expected["next_losses"] = train_steps(engine, range(STEPS, STEPS + MORE_STEPS))
    expected["next"] = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            expected["next"][name] = parameter.detach().float().clone()
    if rank == 0:
        torch.save(expected, os.path.join(out, "expected.pt"))
    torch.distributed.barrier()


def train_steps(engine, steps):
    """The mean losses over the ranks."""
    import torch
    losses = []
    for step in steps:
        tokens, targets = batch_of(step, engine.global_rank)
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / engine.world_size)
    return losses


def batch_of(step, rank):
    """Two rows of tokens and targets for a rank."""
    import torch
    tokens = (torch.arange(8).reshape(2, 4) * (step + 2) + 3 * rank + torch.arange(8).reshape(2, 4) ** 2) % 7
    return tokens, (tokens * 2 + 1) % 7


def stage0(engine, parameter, name, expected, states):
    """Stage 0 keeps its masters itself, under the optimizer or in its fp16 or bf16 wrapper."""
    masters = {id(parameter): parameter}
    wrapper = engine.optimizer
    for low, high in zip(getattr(wrapper, "fp16_groups", getattr(wrapper, "bf16_groups", [])), getattr(wrapper, "fp32_groups", [])):
        if isinstance(low, list):
            masters.update({id(a): b for a, b in zip(low, high)})
    inner = getattr(wrapper, "optimizer", wrapper)
    master = masters[id(parameter)]
    if hasattr(parameter, "get_full_hp_param"):
        expected["fp32"][name] = parameter.get_full_hp_param().clone()
        for state in states:
            expected[state][name] = parameter.get_full_hp_param(optim_state_key=state).clone()
        return
    if master in inner.state:
        expected["fp32"][name] = master.detach().clone().float()
        for state in states:
            expected[state][name] = inner.state[master][state].clone()


def convert(out):
    tag = pathlib.Path(out, "latest").read_text()
    # universal_checkpoint_info is written for Megatron's sake only; the converter does without if told.
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", f"{out}/{tag}", "--output_folder",
                    f"{out}/universal", "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"], check=True,
                   stdout=subprocess.DEVNULL)
    shutil.rmtree(f"{out}/{tag}")


def make(variant, folder):
    """The checkpoint folder of a variant in `folder`, by ranks started here."""
    ranks = VARIANTS[variant][2]
    with tempfile.TemporaryDirectory() as meeting:
        environment = dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(free_port()), TMPDIR=meeting)
        processes = [subprocess.Popen([sys.executable, __file__, "--rank-of", variant, "--out", folder],
                                      env=dict(environment, RANK=str(r), LOCAL_RANK=str(r)), stdout=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE, text=True) for r in range(ranks)]
        try:
            for process in processes:
                error = process.communicate(timeout=300)[1]
                if process.returncode:
                    raise SystemExit(f"{variant}: {error[-3000:]}")
        finally:
            for process in processes:
                process.kill()
    if VARIANTS[variant][3].get("universal"):
        convert(folder)


def free_port():
    import socket
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def plain(entry):
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return None if entry.name.endswith(".py") else entry


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--out")
    parser.add_argument("--rank-of")
    arguments = parser.parse_args()
    if arguments.rank_of:
        return train(arguments.rank_of, arguments.out)
    for variant in [arguments.only] if arguments.only else VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            make(variant, arguments.out or folder)
            if not arguments.out:
                pack(variant, folder)


def pack(variant, folder):
    with tarfile.open(HERE / f"{variant}.tar.xz", "w:xz", preset=9) as packed:
        packed.add(folder, arcname=".", filter=plain)
    print(f"{variant}: {(HERE / f'{variant}.tar.xz').stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
