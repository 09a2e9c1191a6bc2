"""Uses that once went wrong, at every stage: edits before a save, writes to this rank's pieces, statistics of batch norms, stale graphs."""
import dense
import pytest
import torch
import torch.nn as nn
from ranks import run_ranks

STAGES = [0, 1, 2, 3]
DTYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def start(stage, model=None, **more):
    import deepspeed
    model = model or Net()
    more.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-2}})
    return model, deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(stage, **more))[0]


def loss_of(engine, rank, step):
    x, y = dense.batch(rank, step)
    dtype = next(p.dtype for p in engine.module.parameters() if p.requires_grad)
    return (engine(x.to(dtype)).float() - y).pow(2).mean()


def train(engine, rank, steps):
    for step in range(steps):
        engine.backward(loss_of(engine, rank, step))
        engine.step()


def edit_then_save(rank, world, stage, dtype, folder):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param
    model, engine = start(stage, **DTYPES[dtype])
    train(engine, rank, 1)
    before = safe_get_full_fp32_param(model.down.weight).clone()
    with torch.no_grad():
        model.up.weight.fill_(0.25)
    assert safe_get_full_fp32_param(model.up.weight).eq(0.25).all()
    assert safe_get_local_fp32_param(model.up.weight).eq(0.25).all()
    assert torch.equal(safe_get_full_fp32_param(model.down.weight), before), "a master that nobody edited was rounded"
    with torch.no_grad():
        model.up.bias.fill_(0.5)
    engine.save_checkpoint(folder)
    engine.destroy()
    model, engine = start(stage, **DTYPES[dtype])
    engine.load_checkpoint(folder)
    for parameter, value in ((model.up.weight, 0.25), (model.up.bias, 0.5)):
        assert parameter.eq(value).all() and safe_get_full_fp32_param(parameter).eq(value).all()
    assert torch.equal(safe_get_full_fp32_param(model.down.weight), before)
    engine.destroy()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_is_in_the_masters_and_in_the_checkpoint(stage, dtype, tmp_path):
    run_ranks(2, edit_then_save, stage, dtype, str(tmp_path))


def local_writes(rank, world, stage, dtype):
    from unshard import access as utils
    model, engine = start(stage, **DTYPES[dtype])
    train(engine, rank, 1)
    engine.backward(loss_of(engine, rank, 1))
    kinds = {"fp32": (utils.safe_get_local_fp32_param, utils.safe_set_local_fp32_param, utils.safe_get_full_fp32_param),
             "grad": (utils.safe_get_local_grad, utils.safe_set_local_grad, utils.safe_get_full_grad),
             "state": (lambda p: utils.safe_get_local_optimizer_state(p, "exp_avg"),
                       lambda p, v: utils.safe_set_local_optimizer_state(p, v, "exp_avg"),
                       lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"))}
    for parameter in model.parameters():
        for kind, (get, put, full) in kinds.items():
            sizes = [None] * world
            torch.distributed.all_gather_object(sizes, get(parameter).numel())
            put(parameter, torch.full_like(get(parameter), rank + 1.0))
            expected = torch.cat([torch.full((n,), r + 1.0) for r, n in enumerate(sizes)])
            assert torch.equal(full(parameter).flatten(), expected), kind
            assert get(parameter).eq(rank + 1.0).all(), kind
        assert torch.equal(parameter.detach().float().flatten(), expected)
    wrong = torch.zeros(3)
    for put in (utils.safe_set_local_fp32_param, utils.safe_set_local_grad):
        with pytest.raises(ValueError, match="up.weight.*elements, the value 3"):
            put(model.up.weight, wrong)
    engine.step()
    assert not model.up.weight.eq(rank + 1.0).any(), "the update used none of it"
    engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_writes_to_a_ranks_piece_take_effect_on_all_ranks(stage, dtype):
    run_ranks(3, local_writes, stage, dtype)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.free, self.out = nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False), nn.Linear(10, 8)
        self.register_buffer("frequencies", torch.arange(3.0) / 7)

    def forward(self, x):
        return self.out(self.free(self.norm(self.conv(x.view(-1, 2, 4)))).flatten(1))


def batch_norm(rank, world, stage, dtype):
    model, engine = start(stage, Convolution(), **DTYPES[dtype])
    train(engine, rank, 2)
    engine.eval()
    assert engine(torch.zeros(2, 8, dtype=model.conv.weight.dtype)).isfinite().all()
    assert model.norm.running_mean.abs().max() > 0 and model.norm.num_batches_tracked == 2
    assert model.frequencies.dtype == torch.float32, "a buffer of the user's was rounded"
    engine.destroy()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("stage", [0, 3])
def test_batch_norms_train_in_16_bits(stage, dtype):
    run_ranks(2, batch_norm, stage, dtype)


def stale_autocast_graph(rank, world, stage):
    model, engine = start(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    held = engine(dense.batch(rank, 0)[0])                  # its graph holds casts of the weights as they are now
    train(engine, rank, 2)
    engine.destroy()
    if stage < 3:
        held.sum().backward()
    else:                                                   # the casts were to be made again from weights that are gone
        with pytest.raises(RuntimeError, match="weight' was updated after autocast cast it"):
            held.sum().backward()
    assert model(dense.batch(rank, 0)[0]).isfinite().all()


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_ends_while_a_graph_holds_casts_of_older_weights(stage):
    run_ranks(2, stale_autocast_graph, stage)


class WithTable(Net):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)


def frozen_of_other_dtypes(rank, world, stage, client):
    import deepspeed
    model = WithTable()
    config = dense.config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if client else None
    engine, handle, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config)
    before = model.up.weight.detach().clone()
    train(engine, rank, 2)
    handle.load_state_dict(handle.state_dict())
    train(engine, rank, 1)
    assert torch.equal(model.table.detach(), torch.arange(5)) and model.wide.dtype == torch.float64
    assert not torch.equal(model.up.weight.detach(), before)
    engine.destroy()


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_group_may_hold_frozen_parameters_of_any_dtype(stage, client):
    run_ranks(2, frozen_of_other_dtypes, stage, client)
