"""accelerate with a DeepSpeed JSON, unchanged: the usual loop, saving and loading the state, and the whole model at the end.

    deepspeed --num_gpus=2 examples/train_accelerate.py --output_dir out     # or torchrun, or accelerate launch
"""
import argparse
import pathlib

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from train_hf_trainer import VOCABULARY, rows
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = pathlib.Path(__file__).parent / "configs" / "hf-zero3.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--output_dir", default="out")
    args = parser.parse_args()
    plugin = DeepSpeedPlugin(hf_ds_config=str(CONFIG), gradient_accumulation_steps=2, gradient_clipping=1.0)
    more = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]      # without a GPU accelerate sees one process
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin, kwargs_handlers=more)
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=4))
    optimizer = DummyOptim(model.parameters(), lr=1e-2)                # the JSON names the optimizer and the schedule
    scheduler = DummyScheduler(optimizer, total_num_steps=32, warmup_num_steps=4)
    loader = torch.utils.data.DataLoader(rows(256, 0), batch_size=8, shuffle=True)
    evaluation = torch.utils.data.DataLoader(rows(32, 1), batch_size=8)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(model, optimizer, loader, evaluation, scheduler)

    for epoch in range(3):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(**batch).loss.repeat(8)) for batch in evaluation]
        accelerator.print(f"epoch {epoch}: eval_loss {torch.cat(losses).mean().item():.4f}")
        accelerator.save_state(f"{args.output_dir}/state")
    accelerator.wait_for_everyone()
    accelerator.load_state(f"{args.output_dir}/state")
    bare = accelerator.unwrap_model(model)
    bare.save_pretrained(args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
                         state_dict=accelerator.get_state_dict(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
