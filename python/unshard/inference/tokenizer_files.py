"""The tokenizer of a model's folder or GGUF file.

transformers reads it: it knows every family's habits, but takes seconds to import, and more to convert a GGUF. What it ended up with is
kept (~/.cache/unshard/tokenizers), so that only the first start pays."""
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile

from unshard.inference.tokenizer import Tokenizer

_FORMAT = 1
_NAMES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "chat_templates/*")


def load_tokenizer(path, cache=None):
    """path: a folder or a GGUF file. cache: a folder; None: the user's. Raises ValueError or OSError, one line that names the file."""
    import tokenizers
    path = model_path(path)
    kept = (pathlib.Path(cache) if cache else _cache_folder()) / f"{_fingerprint(path)}.json"
    try:
        parts = json.loads(kept.read_text(encoding="utf-8"))
        return Tokenizer(tokenizers.Tokenizer.from_str(parts["tokenizer"]), parts["chat_template"], parts["special_tokens"])
    except Exception:                 # absent, or damaged in any way: made anew (tokenizers raises plain Exceptions)
        parts = _read_by_transformers(path)
    _keep(kept, parts)
    return Tokenizer(tokenizers.Tokenizer.from_str(parts["tokenizer"]), parts["chat_template"], parts["special_tokens"])


def model_path(path):
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file; MODEL is a Hugging Face folder or a GGUF file on this machine")
    return path


def _read_by_transformers(path):
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"{path}: its tokenizer can't be read: {error}; pip install transformers") from error
    try:
        if path.is_dir():
            found = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        else:
            found = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:        # whatever a damaged file makes transformers stumble over
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path}: its tokenizer can't be read: {type(error).__name__}: {reason}") from error
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{path}: its tokenizer ({type(found).__name__}) has no tokenizer.json; convert it")
    template = found.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {name: str(value) for name, value in found.special_tokens_map.items() if isinstance(value, str)}
    return {"tokenizer": backend.to_str(), "chat_template": template, "special_tokens": special}


def _fingerprint(path):
    """Of what the result depends on: the files' names, sizes and times, and the libraries that read them."""
    files = sorted({f for name in _NAMES for f in path.glob(name)}) if path.is_dir() else [path]
    facts = [_FORMAT, str(path.resolve()), [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files],
             [_version(name) for name in ("transformers", "tokenizers")]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache_folder():
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "unshard" / "tokenizers"


def _keep(path, parts):
    """Whole or not at all; a disk that takes nothing only makes the next start slow again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(parts, file)
        os.replace(file.name, path)
    except OSError:
        pass
