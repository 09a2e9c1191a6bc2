"""Hugging Face models under ZeRO-3, unmodified: loaded without any rank holding the whole, resized, with PEFT's adapters, as accelerate
prepares them."""
import os
import resource

import hf_tools
import pytest
import torch
from ranks import run_ranks
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

pytest.importorskip("accelerate", reason="accelerate is not installed (make setup installs it)")
LIMIT = 240
MIB = 2**20


def close(found, wanted, atol=2e-5):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].float(), value.float(), atol=atol, rtol=1e-4, msg=lambda m: f"{name}: {m}")


def load_and_resize(rank, world, folder):
    import transformers
    config = hf_tools.ds_config(3)
    keep = HfDeepSpeedConfig(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.model.embed_tokens.weight.ds_numel == hf_tools.VOCABULARY * 32
    original = hf_tools.llama(tied=True)
    close(hf_tools.whole_weights(model), dict(original.named_parameters()), atol=0)
    model.resize_token_embeddings(hf_tools.VOCABULARY + 7)
    assert model.get_input_embeddings().weight.shape == (hf_tools.VOCABULARY + 7, 32) and model.config.vocab_size == hf_tools.VOCABULARY + 7
    assert torch.equal(model.get_input_embeddings().weight[:hf_tools.VOCABULARY].detach(), original.model.embed_tokens.weight.detach())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    twin_weights = hf_tools.whole_weights(model)
    trainer = hf_tools.trainer_class()(model=model, args=hf_tools.arguments(os.path.join(folder, "out"), 3, config),
                                       train_dataset=hf_tools.rows(48))
    trainer.train()
    del keep
    unset_hf_deepspeed_config()
    twin = hf_tools.llama(tied=True, vocab_size=hf_tools.VOCABULARY + 7)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(twin_weights[name])
    hf_tools.plain_run(twin, hf_tools.rows(48), 6)
    close(hf_tools.whole_weights(model), dict(twin.named_parameters()))


def test_a_pretrained_model_is_loaded_resized_and_trained_under_zero_3(tmp_path):
    hf_tools.llama(tied=True).save_pretrained(tmp_path)
    run_ranks(2, load_and_resize, str(tmp_path), limit=LIMIT)


def peak_of_loading(rank, world, folder, size_mib):
    """MiB of private memory that from_pretrained took at most, beyond what this process had."""
    import transformers
    hf_tools.llama()
    keep = HfDeepSpeedConfig(hf_tools.ds_config(3, bf16={"enabled": False}))
    import deepspeed
    deepspeed.init_distributed()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    assert keep.is_zero3() and sum(p.numel() for p in model.parameters()) * 4 / MIB == pytest.approx(size_mib, rel=0.01)
    return peak


def test_no_rank_holds_the_whole_model_while_it_is_loaded(tmp_path):
    model = hf_tools.llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=24, vocab_size=128)
    size = sum(p.numel() for p in model.parameters()) * 4 / MIB
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    del model
    # Without shared memory each rank's memory is its own: its half, a shard of the file, and what a layer takes.
    peaks = run_ranks(2, peak_of_loading, str(tmp_path), size, limit=LIMIT, fresh=True, env={"UNSHARD_SHARE_MEMORY": "off"})
    assert size > 350 and max(peaks) < 0.5 * size + 110, (size, peaks)


def lora(rank, world, stage, folder):
    import peft

    def adapted():
        return peft.get_peft_model(hf_tools.llama(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                                                                     task_type="CAUSAL_LM", init_lora_weights=True))
    torch.manual_seed(0)
    model, data = adapted(), hf_tools.rows(48)
    torch.manual_seed(0)
    twin = adapted()
    args = hf_tools.arguments(os.path.join(folder, "out"), stage, save_strategy="steps", save_steps=3)
    trainer = hf_tools.trainer_class()(model=model, args=args, train_dataset=data)
    trainer.train()
    hf_tools.plain_run(twin, data, 6)
    found, wanted = hf_tools.whole_weights(model), dict(twin.named_parameters())
    close(found, wanted)
    frozen = hf_tools.llama().state_dict()
    assert all(torch.equal(found[f"base_model.model.{name}".replace("_proj.weight", "_proj.base_layer.weight")
                                 if name.split(".")[-2] in ("q_proj", "v_proj") else f"base_model.model.{name}"], value)
               for name, value in frozen.items())
    assert trainer.deepspeed.memory_report()["optimizer"] * world < 12 * sum(p.numel() for p in twin.parameters() if p.requires_grad) + 4096
    trainer.save_model(os.path.join(folder, "adapter"))
    torch.distributed.barrier()
    unset_hf_deepspeed_config()
    again = peft.PeftModel.from_pretrained(hf_tools.llama(), os.path.join(folder, "adapter"))
    close(dict(again.named_parameters()), {n: p.detach() for n, p in wanted.items()})


@pytest.mark.parametrize("stage", [2, 3])
def test_lora_trains_adapters_only_and_saves_them(stage, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed (make setup installs it)")
    run_ranks(2, lora, stage, str(tmp_path), limit=LIMIT)


def accelerated(rank, world, stage):
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=0.5, zero3_save_16bit_model=True)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model, twin, data = hf_tools.llama(), hf_tools.llama(), hf_tools.rows(48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)       # accelerate steps it once a rank
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    hf_tools.plain_run(twin, data, 6)
    state = accelerator.get_state_dict(model)
    if rank == 0 or stage < 3:
        close(state, twin.state_dict())
    assert (state is None) == (stage == 3 and rank > 0)
    assert accelerator.unwrap_model(model) is model.module and model.global_steps == 6
    accelerator.free_memory()


@pytest.mark.parametrize("stage", [1, 3])
def test_accelerate_equals_a_plain_loop(stage):
    run_ranks(2, accelerated, stage, limit=LIMIT)


def save_as_accelerate_says(rank, world, folder):
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs
    from safetensors.torch import save_file
    plugin = DeepSpeedPlugin(hf_ds_config={**hf_tools.ds_config(3), "optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 1,
                                           "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "train_batch_size": world})
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    from accelerate.utils import DummyOptim
    model = hf_tools.llama(tied=True)
    model, _ = accelerator.prepare(model, DummyOptim(model.parameters()))
    bare = accelerator.unwrap_model(model)
    # Other ranks have no state here, so transformers looks at the module's own, partitioned as it is.
    bare.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
                         state_dict=accelerator.get_state_dict(model))
    state = bare.state_dict()
    embedding, where = state["model.embed_tokens.weight"], {name: value.untyped_storage().data_ptr() for name, value in state.items()}
    assert where["model.embed_tokens.weight"] == where["lm_head.weight"] != where["model.norm.weight"]
    for read in (lambda: save_file({"x": embedding}, os.path.join(folder, "x")), embedding.numpy, embedding.data_ptr):
        with pytest.raises(RuntimeError, match="'model.embed_tokens.weight' is partitioned"):
            read()
    if rank == 0:                       # torch.save takes whole values, on one rank too
        torch.save(state, os.path.join(folder, "saved"))
        saved = torch.load(os.path.join(folder, "saved"))
        assert saved.keys() == state.keys() and all(torch.equal(value, state[name]) for name, value in saved.items())
        os.remove(os.path.join(folder, "saved"))
    accelerator.wait_for_everyone()


def test_every_rank_may_call_save_pretrained_and_reading_bytes_stays_an_error(tmp_path):
    run_ranks(2, save_as_accelerate_says, str(tmp_path), limit=LIMIT)
    found, wanted = hf_tools.saved(tmp_path), dict(hf_tools.llama(tied=True).named_parameters())
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())


def export_adapters(rank, world, folder):
    import peft
    base = hf_tools.llama(hidden_size=64, intermediate_size=192).bfloat16()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), autocast_adapter_dtype=True)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in adapters.values()} == {torch.float32}
    assert sum(p.numel() for p in adapters.values()) < 0.1 * sum(p.numel() for p in model.parameters())
    import deepspeed
    import unshard
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    for step in range(2):
        batch = torch.stack([row["input_ids"] for row in hf_tools.rows(2, seed=step * world + rank)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    engine.empty_partition_cache()
    before = unshard.access.residency_stats(engine)["link_bytes"]
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    fetched = unshard.access.residency_stats(engine)["link_bytes"] - before
    size = sum(p.numel() * p.element_size() for p in adapters.values())
    assert rank > 0 or size / 2 <= fetched <= 2 * size, (fetched, size)         # the other rank's halves
    trained = {name: p.detach().clone() for name, p in adapters.items()}
    for excluded in (False, True):
        engine.save_checkpoint(folder, tag=f"excluded_{excluded}", exclude_frozen_parameters=excluded)
        with torch.no_grad():
            for p in adapters.values():
                p.zero_()
        engine.load_checkpoint(folder, tag=f"excluded_{excluded}")
        assert all(torch.equal(p, trained[name]) for name, p in adapters.items())
        assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    engine.destroy()
    merged = model.merge_and_unload()
    layer = merged.model.layers[0].self_attn.q_proj.weight
    name = "base_model.model.model.layers.0.self_attn.q_proj."
    update = 8 / 2 * trained[name + "lora_B.default.weight"] @ trained[name + "lora_A.default.weight"]
    torch.testing.assert_close(layer.float(), frozen[name + "base_layer.weight"].float() + update, atol=1e-2, rtol=1e-2)
    return None if state is None else sorted(state) == sorted(adapters)


def test_adapters_are_exported_saved_loaded_and_merged_without_moving_the_base(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed (make setup installs it)")
    assert run_ranks(2, export_adapters, str(tmp_path), limit=LIMIT, env={"UNSHARD_SHARE_MEMORY": "off"}) == [True, None]
