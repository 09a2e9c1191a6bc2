"""Where a configuration comes from: a dict, a path, base64 text, `args.deepspeed_config`. Meaning and checks are the C++ Config's."""
import base64
import binascii
import copy
import json
import math
import os

from unshard.core import ConfigError, _core


def choose(args=None, config=None, config_params=None):
    """The one configuration that was given. Raises ConfigError for none, or for two that contradict each other."""
    given = {"config": config, "config_params": config_params, "args.deepspeed_config": getattr(args, "deepspeed_config", None),
             "args.deepscale_config": getattr(args, "deepscale_config", None)}
    given = {k: v for k, v in given.items() if v is not None}
    if not given:
        raise ConfigError("[config] no configuration was given: pass config= (a dict, a path or base64 text), or --deepspeed_config FILE "
                          "in args")
    values = list(given.values())
    if any(v is not values[0] and v != values[0] for v in values[1:]):
        raise ConfigError(f"[config] {' and '.join(given)} were both given and differ; pass one of them")
    return values[0]


def load_config(config, world_size=1, deepspeed_defaults=False):
    """(Config, dict as the user wrote it). `config`: dict, path or base64 text; never changed."""
    if isinstance(config, dict):
        text = json.dumps(_jsonable(config, "config"))
        return _core.Config.from_json(text, world_size, deepspeed_defaults, "argument"), copy.deepcopy(config)
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"[config] {type(config).__name__} can't be a configuration; accepted: dict, path of a JSON file, base64 text")
    path = os.fspath(config)
    if os.path.exists(path):
        parsed = from_file(path, world_size, deepspeed_defaults)
    else:
        parsed = _core.Config.from_json(_decode(path), world_size, deepspeed_defaults, "base64 argument")
    return parsed, json.loads(parsed.to_json())


def load_config_dict(config):
    """The dict of a dict, a path or base64 text, as the user wrote it; not checked."""
    if isinstance(config, dict):
        return config
    path = os.fspath(config)
    if not os.path.exists(path):
        return json.loads(_core.Config.from_json(_decode(path)).to_json())
    with open(path) as file:
        text = file.read()
    try:
        return json.loads(text)
    except json.JSONDecodeError:                          # comments and the like: the engine's own reader takes them
        return json.loads(_core.Config.from_json(text).to_json())


def from_file(path, world_size=1, deepspeed_defaults=False):
    """The Config of a JSON file. Raises ConfigError, also for bytes that aren't text."""
    try:
        path.encode()
        return _core.Config.from_file(path, world_size, deepspeed_defaults)
    except UnicodeError:                         # an error's own text quotes such bytes, or the name has them
        raise ConfigError(f"[config] {why_no_text(path)}") from None


def why_no_text(path):
    name = path.encode(errors="surrogateescape").decode(errors="backslashreplace")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            file.read()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"{name} isn't UTF-8 text: byte 0x{error.object[error.start]:02x} in line {line}; save it as UTF-8"
    except OSError as error:
        return f"{name} can't be read: {error.strerror}"
    return f"{name}: the file's name isn't UTF-8; give it another one"


def _decode(text):
    try:
        decoded = base64.urlsafe_b64decode(text.encode()).decode("utf-8")
        if decoded.lstrip().startswith(("{", "/", "#")):
            return decoded
    except (binascii.Error, UnicodeDecodeError, ValueError):
        pass
    raise ConfigError(f"[config] '{text[:200]}' is no file that exists, nor base64 of a JSON object")


def _jsonable(value, where):
    """A copy that JSON can hold: torch dtypes, enums, paths and numpy numbers become what they mean."""
    if isinstance(value, dict):
        out = {}
        for key, item in value.items():
            if key == "steps_per_print" and where == "config" and isinstance(item, float) and item == math.inf:
                continue                                              # never, which is what leaving it out says
            out[str(key)] = _jsonable(item, f"{where}.{key}")
        return out
    if isinstance(value, (list, tuple)):
        return [_jsonable(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, str)) and type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        if math.isnan(value) or math.isinf(value):
            raise ConfigError(f"[config] {where} is {value}; a finite number is needed")
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "value") and type(value).__mro__[-2].__name__ == "Enum" or hasattr(type(value), "__members__"):
        return _jsonable(value.value, where)
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if hasattr(value, "item"):
        try:
            number = value.item()
        except (RuntimeError, ValueError, TypeError):
            raise ConfigError(f"[config] {where} is a {type(value).__name__} that isn't one number") from None
        return _jsonable(number, where)
    raise ConfigError(f"[config] {where} is a {type(value).__name__}, which JSON can't hold")


def for_partitioning(config):
    """What zero.Init needs of a configuration that may be half resolved ("auto", batch sizes for another world): a JSON-able dict."""
    wanted = ("zero_optimization", "fp16", "bf16", "bfloat16", "data_types", "unshard")
    return _without_auto({k: _jsonable(v, k) for k, v in config.items() if k in wanted})


def _without_auto(value):
    return {k: _without_auto(v) for k, v in value.items() if v != "auto"} if isinstance(value, dict) else value
