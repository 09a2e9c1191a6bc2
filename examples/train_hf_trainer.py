"""transformers' Trainer with a DeepSpeed JSON, unchanged: a small Llama, born partitioned, learns rows of tokens.

    deepspeed --num_gpus=2 examples/train_hf_trainer.py --output_dir out --deepspeed examples/configs/hf-zero3.json --bf16 --use_cpu
"""
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments

VOCABULARY = 128


def rows(count, seed):
    """Each token is the one before it plus 3."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (starts + 3 * torch.arange(16)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def main():
    # The arguments come first: from then on from_config and from_pretrained know of ZeRO-3.
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4))
    trainer = Trainer(model=model, args=training_args, train_dataset=rows(256, 0), eval_dataset=rows(32, 1))
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"eval_loss {metrics['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
