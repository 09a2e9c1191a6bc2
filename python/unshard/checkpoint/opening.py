"""Which checkpoint a path means, whoever wrote it."""
import os

from unshard.checkpoint.deepspeed_reader import DeepSpeedSource, is_deepspeed_folder
from unshard.checkpoint.hf import HfSource, is_hf_folder
from unshard.checkpoint.reader import NativeSource, is_native_folder
from unshard.checkpoint.universal_reader import UniversalSource, is_universal_folder
from unshard.core import CheckpointError


def find_folder(path, tag=None):
    """The folder of `tag` in `path`; without a tag `path` itself where it is a checkpoint, else the newest one in it."""
    path = os.fspath(path)
    if not os.path.isdir(path):
        raise CheckpointError(f"[checkpoint] {path} isn't a folder")
    if tag is None and _kind(path):
        return path
    if tag is None:
        for latest in ("latest", "latest_universal"):
            if os.path.isfile(os.path.join(path, latest)):
                with open(os.path.join(path, latest), encoding="utf-8", errors="replace") as file:
                    tag = file.read().strip()
                break
    tags = tags_of(path)
    if tag is None:
        raise CheckpointError(f"[checkpoint] {path} is no checkpoint and has no file 'latest'; it has {_listed(tags)}")
    folder = os.path.join(path, tag)
    if not _kind(folder):
        raise CheckpointError(f"[checkpoint] {folder} holds no checkpoint; {path} has {_listed(tags)}")
    return folder


def open_folder(folder, groups=None):
    """The Source of a tag's folder. `groups` as in DeepSpeedSource."""
    kind = _kind(folder)
    if kind is None:
        raise CheckpointError(f"[checkpoint] {folder} holds no checkpoint of unshard's or DeepSpeed's, and no weights of Hugging Face's")
    return kind(folder, groups) if kind is DeepSpeedSource else kind(folder)


def open_checkpoint(path, tag=None, groups=None):
    """The Source of a checkpoint: a save_dir (with or without a tag) or a tag's folder."""
    return open_folder(find_folder(path, tag), groups)


def _kind(folder):
    if is_native_folder(folder):
        return NativeSource
    if is_universal_folder(folder):
        return UniversalSource
    if is_deepspeed_folder(folder):
        return DeepSpeedSource
    # Trainer's checkpoint-N holds both weights of Hugging Face's and the engine's folder, which is what `latest` means.
    return HfSource if is_hf_folder(folder) and not os.path.isfile(os.path.join(folder, "latest")) else None


def tags_of(path):
    """The names of the checkpoints in a folder, sorted."""
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and _kind(entry.path)) if os.path.isdir(path) else []


def _listed(tags):
    return f"the tags {', '.join(tags[:10])}{', ...' if len(tags) > 10 else ''}" if tags else "no tags"
