"""transformers.Trainer with TrainingArguments(deepspeed=...), unmodified: its results are those of a plain torch loop."""
import os

import hf_tools
import pytest
import torch
from ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed (make setup installs it)")
pytest.importorskip("accelerate", reason="accelerate is not installed (make setup installs it)")
LIMIT = 240


def close(found, wanted, atol=2e-5):
    assert found.keys() >= wanted.keys(), wanted.keys() - found.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].float(), value.float(), atol=atol, rtol=1e-4, msg=lambda m: f"{name}: {m}")


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry and "train_runtime" not in entry]


def train_and_save(rank, world, stage, folder):
    data, model = hf_tools.rows(48), hf_tools.llama()
    twin = hf_tools.llama()
    trainer = hf_tools.trainer_class()(model=model, args=hf_tools.arguments(folder, stage), train_dataset=data)
    trainer.train()
    losses, norms = hf_tools.plain_run(twin, data, 6)
    torch.testing.assert_close(torch.tensor(logged(trainer, "loss")), torch.tensor(losses), rtol=1e-4, atol=0)
    torch.testing.assert_close(torch.tensor(logged(trainer, "grad_norm")), torch.tensor(norms), rtol=1e-4, atol=0)
    assert trainer.deepspeed.global_steps == 6 and trainer.deepspeed.get_batch_info() == (8, 2, 2)
    close(hf_tools.whole_weights(trainer.model), dict(twin.named_parameters()))
    trainer.save_model(os.path.join(folder, "final"))
    torch.distributed.barrier()
    import transformers
    assert set(hf_tools.saved(os.path.join(folder, "final"))) == set(twin.state_dict())
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    unset_hf_deepspeed_config()
    again = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(folder, "final"))
    close(dict(again.named_parameters()), dict(twin.named_parameters()))


@pytest.mark.parametrize("stage", [2, 3])
def test_training_accumulating_clipping_and_saving_equal_a_plain_loop(stage, tmp_path):
    run_ranks(2, train_and_save, stage, str(tmp_path), limit=LIMIT)


def resume(rank, world, stage, folder):
    def made(**more):
        args = hf_tools.arguments(folder, stage, save_strategy="steps", save_steps=3, bf16=True, **more)
        return hf_tools.trainer_class()(model=hf_tools.llama(), args=args, train_dataset=hf_tools.rows(48))
    through = made()
    through.train()
    wanted = hf_tools.whole_weights(through.model)
    losses = logged(through, "loss")
    through.deepspeed.destroy()
    files = set(os.listdir(os.path.join(folder, "checkpoint-3")))
    assert {"global_step3", "latest", "trainer_state.json", f"rng_state_{rank}.pth"} <= files, files
    resumed = made()
    resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-3"))
    assert logged(resumed, "loss") == losses, (logged(resumed, "loss"), losses)
    for name, value in hf_tools.whole_weights(resumed.model).items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_resumed_from_a_checkpoint_is_the_uninterrupted_one_bit_for_bit(stage, tmp_path):
    run_ranks(2, resume, stage, str(tmp_path), limit=LIMIT)


def best_model(rank, world, stage, folder):
    import transformers

    class Keeps(transformers.TrainerCallback):
        """The weights at each evaluation, and an evaluation loss that is best at step 4."""
        def __init__(self):
            self.weights = {}

        def on_evaluate(self, args, state, control, model=None, **keywords):
            self.weights[state.global_step] = hf_tools.whole_weights(model)

    keeps = Keeps()
    args = hf_tools.arguments(folder, stage, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
                              load_best_model_at_end=True, metric_for_best_model="distance", greater_is_better=False,
                              batch_eval_metrics=False, per_device_eval_batch_size=2)
    distances = iter([5.0, 1.0, 3.0])
    trainer = hf_tools.trainer_class()(model=hf_tools.llama(), args=args, train_dataset=hf_tools.rows(48),
                                       eval_dataset=hf_tools.rows(6, seed=9),
                                       compute_metrics=lambda prediction: {"distance": next(distances)},
                                       callbacks=[keeps])
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    for name, value in hf_tools.whole_weights(trainer.model).items():
        assert torch.equal(value, keeps.weights[4][name]) and not torch.equal(value, keeps.weights[6][name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_the_best_model_is_loaded_at_the_end(stage, tmp_path):
    run_ranks(2, best_model, stage, str(tmp_path), limit=LIMIT)


def generate_in_evaluation(rank, world, folder):
    made, how = [], {"max_new_tokens": 3 + 6 * rank, "do_sample": False, "pad_token_id": 0}

    class Generates(hf_tools.trainer_class()):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            prompt = inputs["input_ids"][:, :4 + rank]
            made.append((prompt, self.model.generate(prompt, **how)))
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    data, twin = hf_tools.rows(48), hf_tools.llama()
    args = hf_tools.arguments(folder, 3, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=2)
    trainer = Generates(model=hf_tools.llama(), args=args, train_dataset=data, eval_dataset=hf_tools.rows(8, seed=9))
    trainer.train()
    hf_tools.plain_run(twin, data, 6)
    close(hf_tools.whole_weights(trainer.model), dict(twin.named_parameters()))
    twin.eval()
    assert len(made) == 4                                   # two evaluations of two batches a rank
    for prompt, out in made[2:]:
        assert torch.equal(out, twin.generate(prompt, **how))
    return [made[-1][1].shape[1], logged(trainer, "eval_loss")]


def test_ranks_generate_unequal_lengths_while_the_trainer_evaluates(tmp_path):
    (short, losses), (long, again) = run_ranks(2, generate_in_evaluation, str(tmp_path), limit=LIMIT)
    assert short < long and losses == again and len(losses) == 2


def evaluate_only(rank, world, folder):
    twin, data = hf_tools.llama(), hf_tools.rows(8, seed=9)
    args = hf_tools.arguments(folder, 3, per_device_eval_batch_size=2)
    trainer = hf_tools.trainer_class()(model=hf_tools.llama(), args=args, eval_dataset=data)
    found = trainer.evaluate()["eval_loss"]
    batch = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        assert found == pytest.approx(twin.eval()(input_ids=batch, labels=batch).loss.item(), rel=1e-4)
    return list(trainer.predict(data).predictions.shape)


def test_a_trainer_that_only_evaluates_needs_no_optimizer(tmp_path):
    assert run_ranks(2, evaluate_only, str(tmp_path), limit=LIMIT) == [[8, 12, hf_tools.VOCABULARY]] * 2


def recompute(rank, world, stage, folder):
    twin, data = hf_tools.llama(), hf_tools.rows(48)
    args = hf_tools.arguments(folder, stage, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": rank == 0})
    trainer = hf_tools.trainer_class()(model=hf_tools.llama(), args=args, train_dataset=data)
    trainer.train()
    hf_tools.plain_run(twin, data, 6)
    close(hf_tools.whole_weights(trainer.model), dict(twin.named_parameters()))


def test_gradient_checkpointing_of_either_kind_changes_nothing(tmp_path):
    run_ranks(2, recompute, 3, str(tmp_path), limit=LIMIT)
