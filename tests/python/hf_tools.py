"""A tiny Llama, rows of tokens, and Trainer's arguments: what the tests with Hugging Face share. Imported on ranks."""
import json
import pathlib

import torch

VOCABULARY = 64


def llama(tied=False, **more):
    import transformers
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, **more}))


def rows(count, length=12, seed=0):
    ids = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def ds_config(stage, **more):
    return {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                                                   "weight_decay": "auto"}},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto",
                                  "stage3_gather_16bit_weights_on_model_save": True}, **more}


def arguments(folder, stage, config=None, **more):
    import transformers
    return transformers.TrainingArguments(**{
        "output_dir": folder, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "deepspeed": config or ds_config(stage),
        "use_cpu": True, "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "lr_scheduler_type": "linear", "warmup_steps": 0,
        "max_steps": 6, "logging_steps": 1, "report_to": [], "save_strategy": "no", "seed": 3, "disable_tqdm": True,
        "dataloader_pin_memory": False, **more})


def trainer_class():
    import transformers

    class InOrder(transformers.Trainer):
        """Rows in their order, so that a plain loop can see the same ones."""

        def _get_train_sampler(self, *args, **keywords):
            return torch.utils.data.SequentialSampler(self.train_dataset)
    return InOrder


def plain_run(model, data, steps, world=2, batch=2, accumulation=2, lr=1e-2, decay=0.1, clip=0.5, of=6):
    """What Trainer does with an optimizer named in the JSON (which decays every parameter), by hand: returns (losses, norms before
    clipping)."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=decay)
    per_step, losses, norms = world * batch * accumulation, [], []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / of)
        batches = [data[(step * per_step + i) % len(data)] for i in range(per_step)]
        total = 0.0
        for row in batches:
            loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss / per_step
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def saved(folder):
    """The tensors of a saved model's safetensors files, by name."""
    from safetensors.torch import load_file
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    return {key: value for name in names for key, value in load_file(folder / name).items()}


def whole_weights(model):
    """Every parameter's value, partitioned or not."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
