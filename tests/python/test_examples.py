"""The examples, as their docstrings say to start them, by the launcher on two ranks; what they save is a model that learned."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HF = ("transformers", "accelerate")


def start(tmp_path, script, *arguments):
    """Standard output, after the script ended well."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", "--no_rank_prefix", str(ROOT / "examples" / script),
               *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def loss_of_the_saved(folder):
    """What plain transformers makes of it."""
    import torch
    import transformers
    sys.path.insert(0, str(ROOT / "examples"))
    from train_hf_trainer import rows
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.stack([row["input_ids"] for row in rows(32, 1)])
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def test_the_plain_loop_learns(tmp_path):
    found = [float(x) for x in re.findall(r"loss ([\d.]+)", start(tmp_path, "train_deepspeed.py", "--deepspeed", "--steps=121"))]
    assert len(found) == 5 and found[-1] < 0.5 * found[0]


def test_the_trainer_learns_and_saves(tmp_path):
    [pytest.importorskip(name, reason=f"{name} is not installed (make setup installs it)") for name in HF]
    out = start(tmp_path, "train_hf_trainer.py", "--output_dir=out", "--deepspeed", str(ROOT / "examples/configs/hf-zero3.json"), "--bf16",
                "--use_cpu", "--num_train_epochs=3", "--learning_rate=1e-2", "--save_strategy=epoch", "--report_to=none",
                "--disable_tqdm=true")
    loss = float(re.search(r"^eval_loss ([\d.]+)", out, re.M).group(1))
    assert loss < 3 and loss_of_the_saved(tmp_path / "out") == pytest.approx(loss, abs=0.05)
    assert len(list((tmp_path / "out").glob("checkpoint-*/global_step*/*"))) >= 3


def test_accelerate_learns_saves_and_loads(tmp_path):
    [pytest.importorskip(name, reason=f"{name} is not installed (make setup installs it)") for name in HF]
    out = start(tmp_path, "train_accelerate.py", "--output_dir=out")
    losses = [float(x) for x in re.findall(r"eval_loss ([\d.]+)", out)]
    assert len(losses) == 3 and losses[-1] < 3 and loss_of_the_saved(tmp_path / "out") == pytest.approx(losses[-1], abs=0.05)
