"""The sampling that a model's makers recommend, from generation_config.json: the server's defaults for requests that say nothing."""
import json
import math

_KEYS = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**31 - 1), "min_p": (0, 1), "repetition_penalty": (0.01, 10)}


def sampling_defaults(path):
    """{SamplingParams' field: value} of a Hugging Face folder; {} where it has no such file, and for a GGUF file. Raises ValueError."""
    file = path / "generation_config.json"
    if not path.is_dir() or not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: isn't JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: isn't a JSON object")
    return {key: _checked(file, key, config[key]) for key in _KEYS if config.get(key) is not None}


def _checked(file, key, value):
    least, most = _KEYS[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value <= most or (key == "top_p" and value == 0) or (key == "min_p" and value == 1) \
            or (key == "top_k" and value != int(value)):
        raise ValueError(f"{file}: {key} is {value!r}; {least} to {most} is wanted (--generation-config none leaves the file out)")
    return int(value) if key == "top_k" else float(value)
