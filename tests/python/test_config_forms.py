"""The forms in which a configuration may arrive, and what `initialize` refuses."""
import argparse
import base64
import copy
import json
import math
import subprocess
import sys

import pytest
import torch

import unshard

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def start(**given):
    engine, *_ = unshard.initialize(model=torch.nn.Linear(3, 2), **given)
    batch = engine.get_batch_info()
    engine.destroy()
    return batch


def test_dict_path_base64_and_args_mean_the_same(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    text = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    args = argparse.Namespace(deepspeed_config=str(path))
    forms = [{"config": CONFIG}, {"config": str(path)}, {"config": path}, {"config": text}, {"config_params": CONFIG}, {"args": args}]
    assert [start(**form) for form in forms] == [(4, 4, 1)] * len(forms)


def test_the_users_dict_is_never_changed():
    config = {**copy.deepcopy(CONFIG), "steps_per_print": float("inf"), "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    before = copy.deepcopy(config)
    engine, *_ = unshard.initialize(model=torch.nn.Linear(3, 2), config=config)
    engine.config["train_batch_size"] = 9
    assert config == before and engine.steps_per_print() is None
    engine.destroy()


def test_two_different_configurations_are_refused():
    with pytest.raises(unshard.ConfigError, match="config and config_params"):
        start(config=CONFIG, config_params={**CONFIG, "train_batch_size": 8})
    with pytest.raises(unshard.ConfigError, match="args.deepspeed_config"):
        start(config=CONFIG, args=argparse.Namespace(deepspeed_config="other.json"))


def test_none_and_nonsense_are_refused():
    with pytest.raises(unshard.ConfigError, match="no configuration"):
        start()
    with pytest.raises(unshard.ConfigError, match="no_such.json"):
        start(config="no_such.json")
    with pytest.raises(unshard.ConfigError, match="int can't be a configuration"):
        start(config=3)
    with pytest.raises(unshard.ConfigError, match="train_batch_size"):
        start(config={**CONFIG, "train_batch_sise": 3})
    with pytest.raises(ValueError, match="must be a torch.nn.Module"):
        unshard.initialize(model=3, config=CONFIG)


def test_python_values_that_mean_json_are_taken():
    config = {**CONFIG, "train_batch_size": torch.tensor(4).item(), "data_types": {"grad_accum_dtype": torch.float32}}
    assert start(config=config) == (4, 4, 1)


@pytest.mark.parametrize("more, words", [
    ({"steps_per_print": -math.inf}, "config.steps_per_print is -inf"), ({"steps_per_print": math.nan}, "config.steps_per_print is nan"),
    ({"zero_optimization": {"stage": 1, "steps_per_print": math.inf}}, "zero_optimization.steps_per_print"),
    ({"gradient_clipping": torch.ones(2)}, "config.gradient_clipping is a Tensor that isn't one number")])
def test_values_that_json_cant_hold_are_named(more, words):
    with pytest.raises(unshard.ConfigError, match=words):
        start(config={**CONFIG, **more})


def test_a_parameter_of_another_model_is_refused():
    other = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match="isn't the model's"):
        unshard.initialize(model=torch.nn.Linear(3, 2), model_parameters=list(other.parameters()), config=CONFIG)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_of_another_engine_is_refused_until_destroyed(stage):
    model, config = torch.nn.Linear(3, 2), {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, *_ = unshard.initialize(model=model, config=config)
    with pytest.raises(ValueError, match="'weight' belongs to another engine"):
        unshard.initialize(model=model, config=config)
    engine.destroy()
    again, *_ = unshard.initialize(model=model, config=config)
    again.destroy()


def test_bytes_that_are_no_text_are_named(tmp_path, capsys):
    from unshard.cli import main
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"train_batch_size": 4,\n "x\xff": 1}')
    with pytest.raises(unshard.ConfigError, match="ds.json isn't UTF-8 text: byte 0xff in line 2"):
        unshard.load_config(path)
    assert main(["config", "show", str(path)]) == 1
    assert capsys.readouterr().err == f"unshard: [config] {path} isn't UTF-8 text: byte 0xff in line 2; save it as UTF-8\n"
    other = tmp_path / "n\udcff.json"
    other.write_text(json.dumps(CONFIG))
    assert main(["config", "show", str(other)]) == 1 and "the file's name isn't UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("folder, why", [("/proc/x", "the folder can't be made"), ("/proc", "nothing can be written there")])
def test_a_run_dir_that_cannot_be_used_is_refused(folder, why):
    code = f"import torch, unshard; unshard.initialize(model=torch.nn.Linear(3, 2), config={ {**CONFIG, 'unshard': {'run_dir': folder}} })"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"ConfigError: [config] unshard.run_dir = '{folder}' (UNSHARD_RUN_DIR, --run-dir): {why}" in done.stderr
