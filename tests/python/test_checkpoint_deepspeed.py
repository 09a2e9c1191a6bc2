"""Checkpoints of the real DeepSpeed: every value is found and equals what DeepSpeed itself says it is; incomplete or damaged folders and
malicious pickles give clean errors and run nothing."""
import io
import json
import os
import pathlib
import pickle
import random
import shutil
import subprocess

import deepspeed_checkpoints as recorded
import pytest
import torch
from unshard import CheckpointError
from unshard.checkpoint.opening import find_folder, open_checkpoint
from unshard.checkpoint.safe_pickle import load
from unshard.checkpoint.torch_file import foreign_places, loaded, read_torch_file, verify_torch_file

PEER = os.environ.get("UNSHARD_PEERS_PYTHON", "")


def check_values(source, expected):
    """Weights, masters, moments, frozen weights and buffers, all equal bit for bit; and any range of them."""
    draw = random.Random(0)
    checked = 0
    for kind in ("fp32", *recorded.STATES):
        for name, wanted in expected.get(kind, {}).items():
            stored = source.value_kind(name) if kind == "fp32" else kind
            flat = source.read(stored, name)
            assert torch.equal(flat, wanted.reshape(-1)), (kind, name)
            begin, end = sorted(draw.randrange(len(flat) + 1) for _ in range(2))
            assert torch.equal(source.read(stored, name, begin, end), flat[begin:end])
            checked += 1
    for name, wanted in expected["frozen"].items():
        if name in source.parameters:
            assert torch.equal(source.weight(name).float(), wanted.float()), name
            checked += 1
    state = source.python_state()
    assert all(torch.equal(state["buffers"][name], wanted) for name, wanted in expected["buffers"].items())
    assert state["lr_scheduler"] == expected["lr_scheduler"]
    assert state["client_state"] == {"epoch": 2, "note": "mine", "seen": [1, 2, (3,)]}
    return checked


def test_the_files_of_a_folder_are_found_for_code_that_opens_them_itself(tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_model_state_files, get_optim_files
    for name in ("zero_pp_rank_10_mp_rank_00_optim_states.pt", "zero_pp_rank_9_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt",
                 "zero_pp_rank_0_mp_rank_00_model_states.pt", "latest"):
        (tmp_path / name).touch()
    assert [os.path.basename(path) for path in get_optim_files(tmp_path)] == [
        "zero_pp_rank_9_mp_rank_00_optim_states.pt", "zero_pp_rank_10_mp_rank_00_optim_states.pt"]
    assert len(get_model_state_files(str(tmp_path))) == 2
    assert [os.path.basename(get_model_state_file(str(tmp_path), stage)) for stage in (2, 3)] == [
        "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
    for call in (lambda: get_optim_files(tmp_path / "no"), lambda: get_model_state_file(tmp_path / "no", 2)):
        with pytest.raises(FileNotFoundError, match="convert_zero_checkpoint_to_fp32_state_dict"):
            call()


@pytest.mark.parametrize("variant", recorded.VARIANTS)
def test_every_value_equals_what_deepspeed_says(tmp_path, variant):
    folder, expected = recorded.unpack(variant, tmp_path)
    source = open_checkpoint(folder, groups=recorded.GROUPS) if "universal" not in variant else open_checkpoint(folder)
    assert check_values(source, expected) >= 10
    counters = source.contents["counters"]
    assert all(counters[key] == expected[key] for key in ("global_steps", "global_samples", "skipped_steps"))
    assert counters["micro_steps"] == 4 and counters["applied_updates"] == 4
    if expected["loss_scale"] is not None:
        assert source.contents["loss_scaler"]["scale"] == expected["loss_scale"]
    assert [p["name"] for p in source.contents["parameters"] if p["group"] >= 0] == [
        "embed.weight", "mid.weight", "mid.bias", "norm.weight", "norm.bias"]
    assert {p["name"]: p["group"] for p in source.contents["parameters"] if p["group"] >= 0} == {
        name: i for i, names in enumerate(recorded.GROUPS) for name in names}, source.contents["parameters"]
    assert source.shared == {"head.weight": "embed.weight"}
    # Stages 0 with 16 bits count the step of zeros that DeepSpeed makes at start to set its states aside.
    steps = 5 if variant in ("stage0-fp16", "stage0-bf16") else 4
    assert {p["steps"] for p in source.contents["parameters"] if p["group"] >= 0} == {steps}
    assert [group["weight_decay"] for group in source.contents["groups"]][:2] == ([0.1, 0.0])
    json.dumps(source.contents)
    source.verify()


def test_stage_0_names_its_optimizer_states_by_shape_and_value_where_only_one_reading_fits(tmp_path):
    folder, expected = recorded.unpack("stage0-bf16", tmp_path / "a")
    assert check_values(open_checkpoint(folder), expected) == 17
    folder, _ = recorded.unpack("stage0-fp32", tmp_path / "b")           # the frozen layer has the shapes of the next one: two readings
    source = open_checkpoint(folder)
    assert "more than one reading" in source.without_optimizer
    assert source.contents["optimizer"]["states"] == [] and source.value_kind("mid.weight") == "param"
    with pytest.raises(CheckpointError, match="groups of"):
        open_checkpoint(folder, groups=[["embed.weight"], []])


def test_a_folder_is_found_by_latest_by_tag_or_itself(tmp_path):
    folder, _ = recorded.unpack("stage2-fp32", tmp_path)
    assert find_folder(tmp_path) == find_folder(tmp_path, "global_step4") == find_folder(folder) == folder
    with pytest.raises(CheckpointError, match="has the tags global_step4"):
        find_folder(tmp_path, "global_step5")
    os.remove(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="no file 'latest'"):
        find_folder(tmp_path)
    with pytest.raises(CheckpointError, match="isn't a folder"):
        find_folder(tmp_path / "gone")


def remove(folder, pattern):
    for path in pathlib.Path(folder).glob(pattern):
        path.unlink()


@pytest.mark.parametrize("variant, spoil, words", [
    ("stage2-fp32", lambda f: remove(f, "zero_pp_rank_1_*"), ["rank 1"]),
    ("stage2-fp32", lambda f: remove(f, "zero_pp_rank_2_*"), ["3 ranks", "of 2"]),
    ("stage2-fp32", lambda f: remove(f, "*optim*"), ["optim_states"]),
    ("stage3-fp32", lambda f: remove(f, "zero_pp_rank_2_*model*"), ["model states of 2"]),
    ("stage3-fp32", lambda f: remove(f, "zero_pp_rank_0_*model*"), ["rank 0"]),
    ("stage1-bf16", lambda f: shutil.copy(f + "/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                                          f + "/zero_pp_rank_0_mp_rank_00_optim_states.pt"), ["two sets", "older"]),
    ("stage1-fp32", lambda f: shutil.copy(f + "/mp_rank_00_model_states.pt", f + "/mp_rank_01_model_states.pt"), ["tensor parallelism"]),
    ("stage2-universal", lambda f: remove(f, "zero/mid.bias/fp32.pt"), ["mid.bias"]),
    ("stage2-universal", lambda f: shutil.rmtree(f + "/zero/mid.bias"), ["zero/mid.bias"]),
    ("stage1-fp32", lambda f: os.truncate(f + "/zero_pp_rank_1_mp_rank_00_optim_states.pt", 3000), ["rank_1", "cut short"]),
])
def test_what_is_missing_is_said(tmp_path, variant, spoil, words):
    folder, _ = recorded.unpack(variant, tmp_path)
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("variant", ["stage0-fp16", "stage2-fp16", "stage3-bf16", "stage2-universal"])
def test_damaged_files_give_only_checkpoint_errors(tmp_path, variant):
    folder, _ = recorded.unpack(variant, tmp_path)
    draw = random.Random(1)
    paths = [path for path in pathlib.Path(folder).rglob("*.pt")]
    refused = 0
    for _ in range(150):
        path = draw.choice(paths)
        whole = path.read_bytes()
        spoilt = bytearray(whole)
        for _ in range(draw.randrange(1, 20)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        path.write_bytes(spoilt[:draw.randrange(len(spoilt))] if draw.random() < 0.3 else spoilt)
        try:
            source = open_checkpoint(folder, groups=None)
            source.python_state()
            for kind, name in source.pieces:
                source.read(kind, name)
            source.verify()                  # a flipped bit in a value is a matter of the zip's checksum
        except CheckpointError:
            refused += 1
        path.write_bytes(whole)
    assert refused > 100


def mutate(draw, value):
    """`value` with one part of it replaced by something of another kind, or removed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        copy = dict(value)
        if draw.random() < 0.2:
            del copy[key]
        else:
            copy[key] = mutate(draw, value[key])
        return copy
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], mutate(draw, value[place]), *value[place + 1:]]
    return draw.choice([None, -1, 10**12, "text", [], {}, True, [[1]], {"a": {}}, torch.ones(3), torch.empty(0), torch.ones(2, 2), b"x"])


@pytest.mark.parametrize("variant", ["stage0-fp16", "stage2-fp16", "stage3-fp32", "stage2-universal", "stage3-universal"])
def test_states_of_another_form_give_only_checkpoint_errors(tmp_path, variant):
    folder, _ = recorded.unpack(variant, tmp_path)
    draw = random.Random(5)
    paths = sorted(pathlib.Path(folder).rglob("*_states.pt")) + sorted(pathlib.Path(folder).rglob("mid.bias/*.pt"))
    paths += list(pathlib.Path(folder).rglob("optimizer_state.pt"))
    refused = 0
    for _ in range(60):
        path = draw.choice(paths)
        whole = path.read_bytes()
        states = loaded(read_torch_file(path))
        for key in draw.sample(sorted(states), len(states)) if isinstance(states, dict) else []:
            if foreign_places({key: states[key]}):          # these can't be pickled again
                states[key] = None
        torch.save(mutate(draw, states), path)
        try:
            source = open_checkpoint(folder)
            source.python_state()
            json.dumps(source.contents)
            for kind, name in source.pieces:
                source.read(kind, name)
        except CheckpointError:
            refused += 1
        path.write_bytes(whole)
    assert refused > 10


@pytest.mark.filterwarnings("ignore:invalid escape")
def test_damaged_files_of_torchs_older_format_give_only_checkpoint_errors(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(9), "b": [torch.arange(3), "text"]}, path, _use_new_zipfile_serialization=False)
    whole, draw = path.read_bytes(), random.Random(3)
    refused = 0
    for _ in range(500):
        spoilt = bytearray(whole[:draw.randrange(1, len(whole))] if draw.random() < 0.3 else whole)
        for _ in range(draw.randrange(1, 4)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        path.write_bytes(spoilt)
        try:
            loaded(read_torch_file(path))
        except CheckpointError:
            refused += 1
    assert refused > 300


@pytest.mark.filterwarnings("ignore:invalid escape")
def test_mutated_pickles_give_only_checkpoint_errors_and_run_nothing(tmp_path, monkeypatch):
    folder, _ = recorded.unpack("stage2-fp16", tmp_path)
    import zipfile
    with zipfile.ZipFile(os.path.join(folder, "zero_pp_rank_0_mp_rank_00_optim_states.pt")) as archive:
        whole = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    monkeypatch.setattr(os, "system", lambda *a: pytest.fail("ran"))
    draw = random.Random(2)
    refused = 0
    for _ in range(1500):
        spoilt = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(spoilt))
            spoilt[place:place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        try:
            load(io.BytesIO(bytes(spoilt)), "x", lambda id: id)
        except CheckpointError:
            refused += 1
    assert refused > 800


class Runs:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_malicious_pickle_runs_nothing(tmp_path, protocol):
    ran = tmp_path / "ran"
    for function, argument in ((os.system, f"touch {ran}"), (eval, f"open({str(ran)!r}, 'w')"), (exec, f"open({str(ran)!r}, 'w')"),
                               (subprocess.getoutput, f"touch {ran}"), (pathlib.Path.touch, ran), (open, (str(ran)))):
        value = load(io.BytesIO(pickle.dumps({"x": Runs(function, argument), "y": 1}, protocol)), "x")
        assert value["y"] == 1 and not ran.exists()
        assert [place for place, _ in foreign_places(value)] == ["['x']"]
    # by hand: attributes of what is known, calls of calls, classes set up so that a later step calls them
    for stream in (b"cos\nsystem\n(S'touch %b'\ntR." % bytes(ran), b"(S'touch %b'\nios\nsystem\n." % bytes(ran),
                   b"c__builtin__\ngetattr\n(cos\nS'system'\ntR(S'touch %b'\ntR." % bytes(ran),
                   b"\x80\x02ccollections\nOrderedDict\n}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsbX\x01\x00\x00\x00xb.",
                   b"\x80\x04\x82\x01."):
        try:
            load(io.BytesIO(stream), "x")
        except CheckpointError:
            pass
        assert not ran.exists()
    assert "__setstate__" not in dir(__import__("collections").OrderedDict)


def test_a_file_with_unknown_objects_gives_its_weights_and_says_what_it_left_out(tmp_path):
    folder, expected = recorded.unpack("stage1-fp32", tmp_path)
    path = os.path.join(folder, "mp_rank_00_model_states.pt")
    states = loaded(read_torch_file(path))
    ran = tmp_path / "ran"
    states["bad"] = {"deep": [Runs(os.system, f"touch {ran}")]}
    torch.save(states, path)
    source = open_checkpoint(folder)
    assert source.python_state()["left_out"] == {"['bad']['deep'][0]": "posix.system"}
    assert check_values(source, expected) == 17 and not ran.exists()
    states["module"]["mid.bias"] = Runs(os.system, f"touch {ran}")
    states["param_shapes"] = Runs(os.system, f"touch {ran}")
    torch.save(states, path)
    with pytest.raises(CheckpointError, match="param_shapes"):
        open_checkpoint(folder)
    assert not ran.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_of_every_kind_of_value_are_read_as_torch_load_reads_them(tmp_path, zipped):
    import argparse
    import collections
    import datetime
    import decimal

    import numpy
    weight = torch.arange(24.0).reshape(2, 3, 4)
    value = {"w": weight, "view": weight[1, ::2], "t": weight.transpose(0, 2), "same": weight, "p": torch.nn.Parameter(weight),
             "bf16": weight.bfloat16(), "empty": torch.empty(0, 3), "scalar": torch.tensor(5), "bool": torch.tensor([True]),
             "c": torch.tensor([1j]), "u16": torch.tensor([7], dtype=torch.uint16), "dtype": torch.bfloat16, "size": torch.Size([2]),
             "device": torch.device("cpu"), "od": collections.OrderedDict(a=1), "dd": collections.defaultdict(list, a=[1]),
             "counter": collections.Counter("aab"), "deque": collections.deque([1, 2], 3), "set": {1, 2}, "fs": frozenset([1]),
             "bytes": b"\0\xff", "ba": bytearray(b"x"), "complex": 1j, "range": range(3), "big": 1 << 100, "ns": argparse.Namespace(a=[1]),
             "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc), "delta": datetime.timedelta(1),
             "path": pathlib.Path("a/b"), "decimal": decimal.Decimal("1.5"), "array": numpy.arange(6, dtype="<i4").reshape(2, 3),
             "f": numpy.asfortranarray(numpy.eye(3)), "number": numpy.float64(1.5), "rng": numpy.random.get_state(),
             "none": None, "text": "naïve", "nan": float("inf")}
    if not zipped:
        del value["u16"]                     # torch can't load its own older format of these
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    got, wanted = loaded(read_torch_file(tmp_path / "x.pt")), torch.load(tmp_path / "x.pt", weights_only=False)
    assert list(got) == list(wanted) and not foreign_places(got) and verify_torch_file(tmp_path / "x.pt") > 96
    for key in wanted:
        if isinstance(wanted[key], torch.Tensor):
            assert torch.equal(got[key], wanted[key].detach()) and got[key].stride() == wanted[key].stride(), key
        elif isinstance(wanted[key], numpy.ndarray):
            assert numpy.array_equal(got[key], wanted[key]) and got[key].dtype == wanted[key].dtype, key
        elif key == "rng":
            assert numpy.array_equal(got[key][1], wanted[key][1]) and got[key][2:] == wanted[key][2:]
        else:
            assert got[key] == wanted[key] and type(got[key]) is type(wanted[key]), key
    assert got["w"] is got["same"]


@pytest.mark.skipif(not PEER, reason="UNSHARD_PEERS_PYTHON names no Python with the real DeepSpeed")
@pytest.mark.parametrize("variant", ["stage2-fp32", "stage3-bf16", "stage3-universal"])
def test_fresh_checkpoints_of_the_real_deepspeed(tmp_path, variant):
    subprocess.run([PEER, str(recorded.DATA / "make.py"), "--only", variant, "--out", str(tmp_path)], check=True, timeout=300)
    expected = loaded(read_torch_file(tmp_path / "expected.pt"))
    source = open_checkpoint(tmp_path, "universal" if "universal" in variant else None)
    assert check_values(source, expected) >= 10
