"""The encoding of Python values: what goes in comes back, type for type; reading runs nothing; errors say where and what to do."""
import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import random
import threading
import types
import uuid
import zoneinfo

import numpy
import pytest
import torch
from unshard import CheckpointError
from unshard.checkpoint.encoding import decode, encode

safetensors = pytest.importorskip("safetensors.torch")


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 3


class Mode(str, enum.Enum):
    FAST = "fast"


def same(a, b):
    """Equal in value and in type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
                and numpy.array_equal(raw(a), raw(b)))
    if isinstance(a, numpy.ndarray | numpy.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same(vars(a), vars(b))
    if isinstance(a, dict):                  # in the same order; keys may be tensors, which are never equal
        extras = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return extras and len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b))
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return a == b


def raw(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def through_files(value, folder):
    """Encoded, through a JSON file and a safetensors file, decoded."""
    text, tensors = encode(value)
    safetensors.save_file(tensors, folder / "state.safetensors")
    return decode(json.dumps(json.loads(text)), safetensors.load_file(folder / "state.safetensors"))


def leaves(draw):
    """One value of every kind that holds no others, drawn by `draw`."""
    eastern = datetime.timezone(datetime.timedelta(hours=-5, minutes=-30, seconds=7), "there")
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
                         torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
                         torch.float8_e4m3fn, torch.float8_e5m2])
    shape = draw.choice([(), (0,), (3,), (2, 0, 5), (2, 3)])
    tensor = torch.tensor([draw.randrange(0, 2) for _ in range(math.prod(shape))], dtype=torch.float32).reshape(shape).to(dtype)
    array = numpy.array([draw.randrange(100) for _ in range(math.prod(shape))]).reshape(shape)
    array = array.astype(draw.choice(["f4", ">f8", "i2", "?", "c8", "M8[s]", "S3", "U4", "u8", "f2", [("a", "i4"), ("b", "f8", (2,))]]))
    return [None, True, False, draw.randrange(-10, 10), draw.getrandbits(90), -(1 << 63), 1 << 63,
            draw.gauss(0, 1) * 10.0**draw.randrange(-300, 300),
            math.inf, -math.inf, math.nan, -0.0, 5e-324, "", "naïve \ud800 \0", "$", "x" * draw.randrange(50), b"", draw.randbytes(9),
            bytearray(b"ab"), draw.randbytes(5000), tensor, array, array.reshape(-1)[0] if array.size else numpy.float32(1.5),
            torch.Size([2, 0]), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), pathlib.Path("a") / "b",
            pathlib.PurePosixPath("/x"),
            pathlib.PureWindowsPath("c:/x"), range(3, -9, -2), complex(-0.0, math.inf), decimal.Decimal("1.10"), uuid.UUID(int=5),
            datetime.datetime(2024, 2, 29, 1, 2, 3, 4, eastern, fold=1), datetime.datetime(1, 1, 1), datetime.date(2024, 2, 29),
            datetime.time(1, 2, 3, tzinfo=datetime.timezone.utc), datetime.timedelta(-3, 4, 5), datetime.timezone.utc, eastern,
            zoneinfo.ZoneInfo("UTC"), numpy.dtype("f4"), Colour.RED, Level.LOW, Mode.FAST, tensor.t() if tensor.dim() == 2 else tensor,
            torch.nn.Parameter(torch.ones(2), requires_grad=draw.random() < 0.5), torch.ones(3, requires_grad=True)]


def hashable(value):
    try:
        hash(value)
        return not isinstance(value, float | complex) or value == value
    except TypeError:
        return False


def program(draw, depth):
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(leaves(draw))
    parts = [program(draw, depth - 1) for _ in range(draw.randrange(4))]
    some = ["a", "b", "$", "key/with.dots", "", "\udcff", 1, (1, ("x", 2.5)), None, b"k", Level.LOW, frozenset([1, "1"])]
    keys = [draw.choice(some) for _ in parts]
    texts = [draw.choice(["a", "b", "c", "", "__metadata__"]) for _ in parts]
    return draw.choice([
        lambda: parts, lambda: tuple(parts), lambda: dict(zip(keys, parts)), lambda: dict(zip(texts, parts)),
        lambda: set(filter(hashable, parts)), lambda: frozenset(filter(hashable, parts)), lambda: collections.OrderedDict(zip(keys, parts)),
        lambda: collections.defaultdict(draw.choice([list, int, None, collections.OrderedDict]), zip(keys, parts)),
        lambda: collections.deque(parts, draw.choice([None, 7])), lambda: collections.Counter(texts),
        lambda: argparse.Namespace(**dict(zip(texts, parts))), lambda: types.SimpleNamespace(**dict(zip(texts, parts))),
    ])()


@pytest.mark.parametrize("seed", range(60))
def test_random_values_come_back_equal(tmp_path, seed):
    draw = random.Random(seed)
    value = [program(draw, 4) for _ in range(4)]
    assert same(through_files(value, tmp_path), value)


def test_every_kind_of_leaf_comes_back_equal(tmp_path):
    value = leaves(random.Random(1))
    for got, wanted in zip(through_files(value, tmp_path), value, strict=True):
        assert same(got, wanted), wanted


def test_the_same_memory_is_written_once_and_shared_again(tmp_path):
    weight = torch.arange(6.0)
    value = {"a": weight, "b": weight, "same": weight.view(6), "parameter": torch.nn.Parameter(weight), "piece": weight[2:4],
             "flat": weight.view(2, 3)}
    tensors = encode(value)[1]
    assert sorted(tensors) == ["a", "flat", "piece"] and tensors["piece"].untyped_storage().nbytes() == 8
    back = through_files(value, tmp_path)
    assert back["a"] is back["b"] and back["parameter"].data_ptr() == back["a"].data_ptr()
    assert back["piece"].tolist() == [2, 3] and back["flat"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_conjugated_negated_and_strided_views_are_written_as_they_look(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 4j])
    value = [z.conj(), z.conj().imag, torch.arange(10)[::3], torch.ones(2, 1).expand(2, 3)]
    for got, wanted in zip(through_files(value, tmp_path), value):
        assert torch.equal(got, wanted) and got.is_contiguous()


def test_states_of_torch_numpy_and_python_generators_schedulers_and_optimizers(tmp_path):
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedules = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10), torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                 torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])]
    value = [torch.get_rng_state(), numpy.random.get_state(), random.getstate(), numpy.random.default_rng(1).bit_generator.state,
             optimizer.state_dict(), *[schedule.state_dict() for schedule in schedules]]
    assert same(through_files(value, tmp_path), value)


def test_the_text_is_the_same_for_equal_values():
    assert encode({"s": {"b", "a", "c", 1}})[0] == encode({"s": {1, "c", "a", "b"}})[0]


class Custom:
    pass


@dataclasses.dataclass
class Data:
    x: int = 1


@pytest.mark.parametrize("value, error, words", [
    ({"client_state": {"lock": threading.Lock()}}, TypeError, ["state['client_state']['lock']", "lock", "save"]),
    ([1, (Custom(),)], TypeError, ["state[1][0]", "Custom"]),
    ({"d": Data()}, TypeError, ["state['d']", "dataclasses.asdict"]),
    ({"f": len}, TypeError, ["builtin_function"]),
    ({"n": collections.namedtuple("N", "x")(1)}, TypeError, ["state['n']", "tuple(...)"]),
    ({"g": torch.Generator()}, TypeError, [".get_state()"]),
    ({"o": torch.optim.SGD([torch.zeros(1)])}, TypeError, [".state_dict()"]),
    ({"t": torch.eye(2).to_sparse()}, TypeError, ["state['t']", "to_dense"]),
    ({"t": torch.empty(2, device="meta")}, TypeError, ["meta"]),
    ({"a": numpy.array([object()])}, TypeError, ["state['a']", "tolist"]),
    ({"d": collections.defaultdict(lambda: 1)}, TypeError, ["state['d']", "dict(...)"]),
])
def test_what_cant_be_encoded_is_named_with_its_place_and_a_way_out(value, error, words):
    with pytest.raises(error) as caught:
        encode(value, "state")
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_value_that_holds_itself_is_an_error_and_one_held_twice_isnt():
    inner = []
    assert decode(*encode([inner, inner])) == [[], []]
    inner.append({"up": inner})
    with pytest.raises(ValueError, match=r"state\['a'\]\[0\]\['up'\] holds itself"):
        encode({"a": inner}, "state")
    deep = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        encode(deep)


def test_an_enum_whose_class_isnt_imported_comes_back_as_its_value():
    text, tensors = encode([Colour.RED, Level.LOW])
    assert decode(text.replace(__name__, "no_such_module_here"), tensors) == ["red", 3]
    assert decode(text.replace('"Colour"', '"Custom"'), tensors)[0] == "red"


def test_damaged_texts_give_only_checkpoint_errors():
    text, tensors = encode(leaves(random.Random(2)))
    draw = random.Random(3)
    refused = 0
    for _ in range(3000):
        place = draw.randrange(len(text))
        cut = text[:place] + draw.choice(["", '"', "[", "}", "0", "$", "null", "-9", "os", "\\"]) + text[place + draw.randrange(4):]
        try:
            decode(cut, tensors)
        except CheckpointError:
            refused += 1
    assert refused > 500
    for bad in ('{"$": "object", "class": "os.system"}', '{"$": ["x"]}', '{"$": "tensor", "key": "gone", "dtype": "float32", "shape": []}',
                "NaN", "[" * 100000, '{"$": "dtype", "value": "nn"}', '{"$": "enum", "module": "os", "class": "system", "name": "x"}'):
        with pytest.raises(CheckpointError):
            decode(bad, {})


def test_a_tensor_of_another_shape_or_dtype_than_the_text_says_is_an_error():
    text, tensors = encode({"w": torch.ones(2, 3)})
    for wrong in (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.int32)):
        with pytest.raises(CheckpointError, match="'w'"):
            decode(text, {"w": wrong})
