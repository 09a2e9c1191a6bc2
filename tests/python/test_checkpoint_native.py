"""The native format read from Python: whole values, any range, the script beside a checkpoint in an interpreter that has torch alone;
damaged folders; memory."""
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest
import torch
from native_checkpoint import write_native
from unshard import CheckpointError
from unshard.checkpoint import consolidate, zero_to_fp32_script
from unshard.checkpoint.opening import open_checkpoint
from unshard.core import _core

SCRIPT = pathlib.Path(zero_to_fp32_script.__file__)


def model_values(seed=0):
    torch.manual_seed(seed)
    weights = {"embed.weight": torch.randn(7, 5), "frozen.weight": torch.randn(5, 5), "mid.weight": torch.randn(5, 3, 2),
               "mid.bias": torch.randn(5), "scalar": torch.randn(()), "none": torch.empty(0, 4)}
    states = {kind: {name: torch.rand(value.shape) for name, value in weights.items()} for kind in ("exp_avg", "exp_avg_sq")}
    return weights, states


def write(save_dir, **more):
    weights, states = model_values()
    more = {"frozen": ["frozen.weight"], "shared": {"head.weight": "embed.weight"},
            "python_state": {"buffers": {"scale": torch.tensor([0.5, 1.5]).half(), "count": torch.tensor(3), "cache": torch.ones(2)},
                             "persistent_buffers": ["scale", "count"], "client_state": {"epoch": 2, "rng": torch.arange(3)},
                             "lr_scheduler": {"last_batch_iteration": 3}}, **more}
    return write_native(str(save_dir), weights, states, **more), weights, states


def wanted_fp32(weights, frozen_dtype=torch.float32):
    """What the fp32 state dict must hold."""
    wanted = {"scale": torch.tensor([0.5, 1.5]), "count": torch.tensor(3), **weights, "head.weight": weights["embed.weight"]}
    wanted["frozen.weight"] = weights["frozen.weight"].to(frozen_dtype).float()
    return wanted


def same(got, wanted):
    return set(got) == set(wanted) and all(torch.equal(got[name], wanted[name]) and got[name].dtype == wanted[name].dtype for name in got)


def test_the_checksum_is_crc32c():
    def of(data):
        return _core.crc32c(torch.tensor(list(data), dtype=torch.uint8))

    # RFC 3720's examples, and the definition, bit by bit
    assert of(b"123456789") == 0xE3069283 and of(b"") == 0
    assert of(bytes(32)) == 0x8A9136AA and of(b"\xff" * 32) == 0x62A8AB43 and of(bytes(range(32))) == 0x46DD794E
    data, crc = random.Random(0).randbytes(1001), 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert of(data) == crc ^ 0xFFFFFFFF
    with pytest.raises(ValueError, match="contiguous"):
        _core.crc32c(torch.ones(2, 2).t())


@pytest.mark.parametrize("dtype, ranks", [("fp32", 1), ("fp32", 3), ("bf16", 2)])
def test_values_ranges_and_state_come_back(tmp_path, dtype, ranks):
    folder, weights, states = write(tmp_path, dtype=dtype, ranks=ranks, seed=ranks)
    source = open_checkpoint(tmp_path)
    assert source.origin == folder and source.names() == list(weights)
    draw = random.Random(1)
    for name, value in weights.items():
        frozen = name == "frozen.weight"
        kind = "param" if frozen or dtype == "fp32" else "fp32"
        assert source.value_kind(name) == kind
        value = value.to(torch.bfloat16) if frozen and dtype == "bf16" else value
        assert torch.equal(source.weight(name), value)
        wanted = {kind: value} if frozen else {kind: value, **{state: values[name] for state, values in states.items()}}
        for kind, whole in wanted.items():
            begin, end = sorted(draw.randrange(whole.numel() + 1) for _ in range(2))
            assert torch.equal(source.read(kind, name, begin, end), whole.reshape(-1)[begin:end])
    state = source.python_state()
    assert state["client_state"]["epoch"] == 2 and torch.equal(state["client_state"]["rng"], torch.arange(3))
    source.verify()


def run_script(checkpoint_dir, out, *options):
    """The script as a user has it: a copy beside the checkpoint, run by a Python that can't import unshard or numpy."""
    shutil.copy(SCRIPT, os.path.join(checkpoint_dir, "zero_to_fp32.py"))
    start = ("import sys; sys.modules['unshard'] = sys.modules['numpy'] = None; import runpy; "
             "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')")
    return subprocess.run([sys.executable, "-W", "ignore", "-c", start, "zero_to_fp32.py", ".", out, *options], cwd=checkpoint_dir,
                          capture_output=True, text=True, timeout=120)


def script(checkpoint_dir, out, *options):
    """The same in this process: its exit status."""
    return zero_to_fp32_script.main([str(checkpoint_dir), str(out), *options])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_script_beside_a_checkpoint_makes_the_same_files_as_the_functions(tmp_path, dtype):
    from safetensors.torch import load_file
    _, weights, _ = write(tmp_path / "c", dtype=dtype)
    wanted = wanted_fp32(weights, torch.bfloat16 if dtype == "bf16" else torch.float32)
    done = run_script(tmp_path / "c", "out")
    assert done.returncode == 0 and not done.stderr, done
    assert os.listdir(tmp_path / "c" / "out") == ["pytorch_model.bin"]
    got = torch.load(tmp_path / "c" / "out" / "pytorch_model.bin", weights_only=True)
    assert same(got, wanted) and got["head.weight"].data_ptr() == got["embed.weight"].data_ptr()
    assert same(torch.load(tmp_path / "c" / "out" / "pytorch_model.bin", mmap=True, weights_only=True), wanted)
    assert script(tmp_path / "c", tmp_path / "safe", "--safe_serialization", "-t", "global_step4") == 0
    assert same(load_file(tmp_path / "safe" / "model.safetensors"), wanted)
    assert same(consolidate.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "c"), wanted)
    lazy = consolidate.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "c", lazy_mode=True)
    assert lazy["mid.weight"].shape == (5, 3, 2) and torch.equal(lazy["mid.weight"].contiguous(), wanted["mid.weight"])
    assert done.stdout.splitlines()[-1] == "out: pytorch_model.bin"


def test_the_second_script_writes_the_weights_in_the_dtype_that_is_asked_for(tmp_path):
    _, weights, _ = write(tmp_path / "c")
    for name in ("zero_to_fp32", "zero_to_torch"):
        shutil.copy(SCRIPT.with_name(f"{name}_script.py"), tmp_path / "c" / f"{name}.py")
    for dtype, kind in (("bf16", torch.bfloat16), ("float16", torch.float16)):
        done = subprocess.run([sys.executable, "zero_to_torch.py", ".", "out", "--dtype", dtype], cwd=tmp_path / "c", capture_output=True,
                              text=True)
        assert done.returncode == 0, done
        consolidate.convert_zero_checkpoint_to_state_dict(tmp_path / "c", tmp_path / "again", dtype=kind)
        wanted = {name: value.to(kind) if value.is_floating_point() else value for name, value in wanted_fp32(weights).items()}
        for folder in (tmp_path / "c" / "out", tmp_path / "again"):
            assert same(torch.load(folder / "pytorch_model.bin", weights_only=True), wanted)
    with pytest.raises(ValueError, match="dtype 'int8' isn't one of"):
        consolidate.convert_zero_checkpoint_to_state_dict(tmp_path / "c", tmp_path / "none", dtype="int8")


def stored(tensors):
    """Bytes of tensors, those that share memory counted once."""
    return sum({t.data_ptr(): t.nbytes for t in tensors.values()}.values())


@pytest.mark.parametrize("safe", [False, True])
def test_shards_are_at_most_as_large_as_asked_and_indexed(tmp_path, safe):
    from safetensors.torch import load_file
    _, weights, _ = write(tmp_path / "c")
    options = ["--safe_serialization"] if safe else []
    out = tmp_path / "out"
    assert script(tmp_path / "c", out, "--max_shard_size", "150B", *options) == 0
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    index = json.loads((out / f"{stem}.{suffix}.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"{stem}-{i + 1:05}-of-{len(names):05}.{suffix}" for i in range(len(names))] and len(names) > 3
    got = {}
    for name in names:
        shard = load_file(out / name) if safe else torch.load(out / name, weights_only=True)
        assert len(shard) == 1 or stored(shard) <= 150 or len({t.data_ptr() for t in shard.values()}) == 1
        assert all(index["weight_map"][key] == name for key in shard)
        got.update(shard)
    assert same(got, wanted_fp32(weights))
    # As with DeepSpeed: tied weights lie in one file of torch's, and count once.
    tied = [name for name in got if sum(torch.equal(got[name], other) for other in got.values()) > 1]
    assert len(tied) == 2 and (safe or len({index["weight_map"][name] for name in tied}) == 1)
    again = 0 if safe else got[tied[0]].nbytes
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted_fp32(weights).values()) - again


def test_frozen_parameters_are_left_out_on_demand_and_excluded_ones_are_absent(tmp_path):
    write(tmp_path / "a")
    assert "frozen.weight" not in consolidate.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "a", exclude_frozen_parameters=True)
    assert script(tmp_path / "a", tmp_path / "out", "--exclude_frozen_parameters") == 0
    assert "frozen.weight" not in torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    write(tmp_path / "b", excluded=["frozen.weight"])
    assert "frozen.weight" not in consolidate.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "b")
    assert script(tmp_path / "b", tmp_path / "out") == 0


def test_weights_load_into_a_plain_model(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

    _, weights, _ = write(tmp_path)
    model = consolidate.load_state_dict_from_zero_checkpoint(Model(), tmp_path)
    assert torch.equal(model.head.weight, weights["embed.weight"])
    model = zero_to_fp32_script.load_state_dict_from_zero_checkpoint(Model(), str(tmp_path))
    assert torch.equal(model.embed.weight, weights["embed.weight"])


def spoil_value(folder):
    path = pathlib.Path(folder, "rank_1.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def edit_manifest(**changes):
    def edit(folder):
        path = pathlib.Path(folder, "manifest.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return edit


@pytest.mark.parametrize("spoil, words", [
    (lambda f: os.remove(f + "/rank_1.safetensors"), ["rank_1.safetensors", "isn't there"]),
    (lambda f: os.truncate(f + "/rank_0.safetensors", 100), ["rank_0.safetensors", "100 bytes", "cut short"]),
    (lambda f: os.remove(f + "/manifest.json"), ["no manifest.json", "no checkpoint", "wasn't finished"]),
    (lambda f: os.truncate(f + "/manifest.json", 500), ["manifest.json"]),
    (edit_manifest(format=3), ["format 3", "format 2"]),
    (edit_manifest(parameters=[]), ["belongs to no parameter"]),
    (edit_manifest(files={"../x": {"bytes": 0, "tensors": {}}}), ["outside of its folder"]),
    (lambda f: shutil.copy(f + "/rank_0.safetensors", f + "/rank_1.safetensors"), ["rank_1.safetensors"]),
])
def test_damaged_folders_are_refused_with_the_file_and_the_reason(tmp_path, capsys, spoil, words):
    folder, _, _ = write(tmp_path)
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert any(word in str(caught.value) for word in words), caught.value
    assert script(tmp_path, tmp_path / "out") == 1 and len(capsys.readouterr().err.splitlines()) == 1
    assert not list(pathlib.Path(tmp_path, "out").glob("*"))


def test_a_flipped_bit_is_found(tmp_path):
    folder, _, _ = write(tmp_path)
    spoil_value(folder)
    with pytest.raises(CheckpointError, match="rank_1.safetensors.*checksum"):
        open_checkpoint(tmp_path).verify()
    state = pathlib.Path(folder, "state.json")
    state.write_text(state.read_text().replace("epoch", "epoxh"))
    with pytest.raises(CheckpointError, match="state.json.*checksum"):
        open_checkpoint(tmp_path).python_state()


def test_mutated_manifests_and_headers_give_only_checkpoint_errors(tmp_path):
    folder, _, _ = write(tmp_path)
    draw = random.Random(4)
    refused = 0
    for _ in range(300):
        files = ["manifest.json", "manifest.json", "rank_0.safetensors", "rank_1.safetensors", "state.json"]
        path = pathlib.Path(folder, draw.choice(files))
        whole = path.read_bytes()
        spoilt = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(min(len(spoilt), 1500))
            spoilt[place:place + draw.randrange(1, 3)] = draw.choice([b"0", b"-", b'"', b"}", b"9", b"\xff", b"null", b"[]", b""])
        path.write_bytes(spoilt)
        try:
            source = open_checkpoint(tmp_path)
            source.python_state()
            for kind, name in source.pieces:
                source.read(kind, name)
            zero_to_fp32_script.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        except CheckpointError:
            refused += 1
        path.write_bytes(whole)
    assert refused > 200


def test_consolidation_needs_no_more_memory_than_the_largest_tensor(tmp_path):
    mb = 1 << 18                              # fp32 elements
    weights = {f"layer{i}": torch.full((8, mb), float(i)) for i in range(8)}
    write_native(str(tmp_path), weights, ranks=2)
    code = ("import resource, sys; sys.path.insert(0, sys.argv[1]); import torch, zipfile, pickle\n"
            "import zero_to_fp32_script as s\n"
            "s.crc32c = None\n"
            "torch.empty(4).fill_(1); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "s.convert_zero_checkpoint_to_fp32_state_dict(sys.argv[2], sys.argv[3], safe_serialization=sys.argv[4] == '1')\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)")
    for safe in "10":
        done = subprocess.run([sys.executable, "-c", code, str(SCRIPT.parent), str(tmp_path), str(tmp_path / f"out{safe}"), safe],
                              capture_output=True, text=True, timeout=120, check=True)
        assert int(done.stdout.splitlines()[-1]) < (8 + 6) * 1024, "kB more than before, for 64 MB in tensors of 8 MB"
