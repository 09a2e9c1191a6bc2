"""`unshard checkpoint`, and the Hugging Face folders that it writes and reads."""
import io
import json
import os
import subprocess
import sys

import deepspeed_checkpoints as recorded
import pytest
import torch
from native_checkpoint import write_native
from unshard.checkpoint.cli import main
from unshard.checkpoint.hf import HfSource, export_hf
from unshard.checkpoint.opening import open_checkpoint
from unshard.checkpoint.progress import Progress, amount
from unshard.cli import main as unshard


def lines(capsys):
    said = capsys.readouterr()
    return said.out.splitlines(), said.err.splitlines()


@pytest.fixture
def native(tmp_path):
    weights = {"embed.weight": torch.randn(7, 5), "frozen.weight": torch.randn(5, 5), "norm.bias": torch.randn(5)}
    states = {"exp_avg": {name: torch.rand(value.shape) for name, value in weights.items()}}
    write_native(str(tmp_path / "c"), weights, states, frozen=["frozen.weight"], shared={"head.weight": "embed.weight"}, dtype="bf16",
                 python_state={"buffers": {"scale": torch.ones(2)}, "client_state": {"epoch": 1}, "lr_scheduler": {"last_epoch": 4}})
    return tmp_path / "c", weights


def test_inspect_says_what_is_in_a_checkpoint(native, capsys):
    folder, _ = native
    (folder / "later").mkdir()                      # no checkpoint
    write_native(str(folder), {"w": torch.ones(2)}, tag="global_step2", latest=False)
    assert unshard(["checkpoint", "inspect", str(folder), "--parameters"]) == 0
    out, err = lines(capsys)
    said = dict(line.split("  ", 1) for line in out[:out.index("")])
    said = {key: value.strip() for key, value in said.items()}
    assert not err and said["folder"] == str(folder / "global_step4") and said["format"] == "unshard 0.1.0"
    assert said["tags beside it"] == "global_step2"
    assert said["parameters"] == "65 elements in 3 tensors, computed in bf16; 1 of them frozen (25 elements)"
    assert said["ranks, stage"] == "2 ranks, ZeRO stage 2 (loads at any)" and said["steps"] == "4 (0 skipped), 16 samples"
    assert said["optimizer"] == "adamw with exp_avg; lr 0.01" and said["client_state"] == "epoch" and said["schedule"] == "last_epoch 4"
    table = [line.split() for line in out[out.index("") + 1:]]
    assert table[1] == ["embed.weight", "7x5", "bf16", "0", "4", "fp32,", "exp_avg"]
    assert table[2] == ["frozen.weight", "5x5", "bf16", "frozen", "0", "param"]
    assert main(["inspect", str(folder), "-t", "global_step2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"][0]["name"] == "w"


def test_verify_and_errors_are_one_line_each(native, capsys):
    folder, _ = native
    assert main(["verify", str(folder)]) == 0
    out, err = lines(capsys)
    assert len(out) == 1 and "5 files" in out[0] and "all as written" in out[0] and not err
    output = str(folder / "x")
    for arguments, words in ((["verify", str(folder), "-t", "global_step9"], "has the tags global_step4"),
                             (["inspect", "gone"], "isn't a folder"),
                             (["convert", str(folder), output, "--to", "universal", "--dtype", "bf16"], "--dtype is for --to hf"),
                             (["consolidate", str(folder), output, "--max_shard_size", "much"], "max_shard_size")):
        assert main(arguments) == 1
        out, err = lines(capsys)
        assert not out and len(err) == 1 and err[0].startswith("unshard: ") and words in err[0]
    path = folder / "global_step4" / "rank_0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    assert main(["verify", str(folder)]) == 1
    assert "rank_0.safetensors" in capsys.readouterr().err


def test_consolidate_and_convert_write_what_loads(native, tmp_path, capsys):
    from safetensors.torch import load_file
    folder, weights = native
    assert main(["consolidate", str(folder), str(tmp_path / "o"), "--safe_serialization", "--max_shard_size", "130B"]) == 0
    assert main(["consolidate", str(folder), str(tmp_path / "o"), "--safe_serialization"]) == 0       # the earlier shards are gone
    assert os.listdir(tmp_path / "o") == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "o" / "model.safetensors")["head.weight"], weights["embed.weight"])
    assert main(["convert", str(folder), str(tmp_path / "u" / "t"), "--to", "universal"]) == 0
    assert main(["convert", str(folder), str(tmp_path / "h"), "--to", "hf", "--dtype", "fp16"]) == 0
    back = load_file(tmp_path / "h" / "model.safetensors")
    assert set(back) == {*weights, "scale"} and torch.equal(back["embed.weight"], weights["embed.weight"].half())
    out, err = lines(capsys)
    assert len(out) == 4 and not err
    source = open_checkpoint(tmp_path / "h")
    assert isinstance(source, HfSource) and source.shared == {"head.weight": "embed.weight"}
    assert torch.equal(source.read("param", "embed.weight", 3, 9), weights["embed.weight"].half().flatten()[3:9])


def test_a_failed_write_leaves_nothing(native, tmp_path, monkeypatch, capsys):
    folder, _ = native
    path = folder / "global_step4" / "state.json"
    whole = path.read_text()
    source = open_checkpoint(folder)
    real = source.read

    def read(kind, name, *span):
        if name == "norm.bias":
            raise OSError("the disk is gone")
        return real(kind, name, *span)

    monkeypatch.setattr(source, "read", read)
    with pytest.raises(OSError):
        export_hf(source, tmp_path / "h", max_shard_size="60B")
    assert os.listdir(tmp_path / "h") == []
    assert path.read_text() == whole


def test_a_transformers_model_goes_out_and_comes_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                      tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "config")
    of_a_run = ("latest", "zero_to_fp32.py", "trainer_state.json", "eval_results.json", "random_states_0.pkl", "training_args.bin")
    for name in (*of_a_run, "tokenizer.model"):        # a Trainer's checkpoint folder serves as well
        (tmp_path / "config" / name).write_text("")
    write_native(str(tmp_path / "c"), {name: value.detach() for name, value in model.named_parameters()},
                 shared={"lm_head.weight": "model.embed_tokens.weight"})
    files = export_hf(open_checkpoint(tmp_path / "c"), tmp_path / "h", max_shard_size="5KB", config_from=tmp_path / "config")
    assert {"config.json", "tokenizer.model", "model.safetensors.index.json"} <= set(files) == set(os.listdir(tmp_path / "h"))
    assert not set(of_a_run) & set(files)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "h")
    tokens = torch.arange(6)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    for safe in (True, False):                      # and what transformers writes is read
        if safe:
            model.save_pretrained(tmp_path / "s", max_shard_size="5KB")
        else:
            (tmp_path / "b").mkdir()
            torch.save(model.state_dict(), tmp_path / "b" / "pytorch_model.bin")
        source = open_checkpoint(tmp_path / ("s" if safe else "b"))
        assert all(torch.equal(source.weight(name), value) for name, value in model.named_parameters())
        source.verify()


def test_a_deepspeed_checkpoint_is_inspected_and_consolidated(tmp_path, capsys):
    recorded.unpack("stage3-bf16", tmp_path / "d")
    folder, expected = recorded.unpack("stage2-fp16", tmp_path / "e")
    for name in "de":
        assert main(["inspect", str(tmp_path / name)]) == 0
    assert "DeepSpeed 0.19.8, ZeRO stage 3" in capsys.readouterr().out
    assert main(["consolidate", folder, str(tmp_path / "o")]) == 0
    state = torch.load(tmp_path / "o" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in expected["fp32"].items())
    assert torch.equal(state["head.weight"], state["embed.weight"]) and torch.equal(state["scale"], torch.tensor([0.5, 1.5]))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_draws_over_one_line_on_a_terminal_and_is_quiet_in_a_file(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "60")
    for stream in (Terminal(), io.StringIO()):
        now[0] = 100.0
        with Progress("verify", stream) as progress:
            for i in range(11):
                progress(i * 10**9, 10**10, f"layers.{i}.weight")
                now[0] += 2
        if stream.isatty():
            parts = stream.getvalue().split("\r")
            assert len(parts) == 14 and "verify  50 %  5.0 GB of 10.0 GB, 500.0 MB/s, 10 s left" in parts[6]
            assert not parts[-1] and not parts[-2].strip() and "\n" not in stream.getvalue() and max(map(len, parts)) < 60
        else:
            assert len(stream.getvalue().splitlines()) == 2
    assert [amount(v) for v in (0, 999, 1500, 2e9)] == ["0 B", "999 B", "1.5 kB", "2.0 GB"] and amount(1500, "") == "1.5 k"


def test_the_drop_ins_names(tmp_path):
    code = ("from deepspeed.utils.zero_to_fp32 import (get_fp32_state_dict_from_zero_checkpoint, load_state_dict_from_zero_checkpoint,\n"
            "    convert_zero_checkpoint_to_fp32_state_dict)\n"
            "from deepspeed.checkpoint.utils import clone_tensors_for_torch_save\n"
            "import deepspeed, torch, sys\n"
            "flat = torch.arange(100.)\n"
            "state = clone_tensors_for_torch_save({'a': [flat[:2], (flat[3:4], 'x')]})\n"
            "assert state['a'][0].untyped_storage().nbytes() == 8 and state['a'][1][0] == 3 and state['a'][1][1] == 'x'\n"
            "from deepspeed.checkpoint.ds_to_universal import main as convert\n"
            "from deepspeed.checkpoint import get_model_ckpt_name_for_rank, get_zero_ckpt_name_for_rank\n"
            "from types import SimpleNamespace\n"
            "import os\n"
            "folder = os.path.join(sys.argv[1], open(os.path.join(sys.argv[1], 'latest')).read())\n"
            "assert os.path.exists(get_model_ckpt_name_for_rank(folder, '00'))\n"
            "assert os.path.exists(get_zero_ckpt_name_for_rank(folder, 1, 0))\n"
            "out = os.path.join(sys.argv[1], 'u', 'universal')\n"
            "convert(SimpleNamespace(input_folder=folder, output_folder=out, strict=True, num_extract_workers=1))\n"
            "assert os.path.isdir(os.path.join(out, 'zero'))\n"
            "print(len(deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(sys.argv[1])))\n")
    recorded.unpack("stage2-fp32", tmp_path)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "9", done
