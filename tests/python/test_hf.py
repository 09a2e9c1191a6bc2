"""Unmodified Hugging Face models under ZeRO-3: gradients equal to the dense model's."""
import dense
import pytest
import torch
from ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (make setup installs it)")


def build(kind):
    import transformers
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                          num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
                                     attn_pdrop=0.0, tie_word_embeddings=True)
    return transformers.GPT2LMHeadModel(config)


def loss_of(model, rank, step):
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(input_ids=ids, labels=ids).loss


def train(rank, world, kind, checkpointing):
    import unshard
    model, twin = build(kind), build(kind)
    if checkpointing:
        model.gradient_checkpointing_enable()
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(3))
    engine.train()
    twin.train()
    for step in range(2):
        engine.backward(loss_of(engine, rank, step))
        dense.accumulate_mean_gradient(twin, [lambda m, r=r: loss_of(m, r, step) for r in range(world)])
        for (name, p), (_, q) in zip(model.named_parameters(), twin.named_parameters()):
            torch.testing.assert_close(unshard.safe_get_full_grad(p), q.grad, atol=1e-5, rtol=1e-4, msg=lambda m: f"{name}: {m}")
        engine.step()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    dense.close(dense.weights(engine, model).values(), twin.parameters(), 2e-5)
    engine.eval()
    twin.eval()
    prompt = torch.randint(64, (1, 3 + rank), generator=torch.Generator().manual_seed(rank))
    kw = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4 + 5 * rank}         # ranks generate unequal lengths
    assert torch.equal(model.generate(prompt, **kw), twin.generate(prompt, **kw))
    with engine.inference_mode():
        assert torch.equal(model.generate(prompt, **kw), twin.generate(prompt, **kw))


@pytest.mark.parametrize("memory", [{}, {"UNSHARD_SHARE_MEMORY": "off"}], ids=["shared", "unshared"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_models_equal_dense(kind, checkpointing, memory):
    run_ranks(2, train, kind, checkpointing, limit=150, env=memory)
