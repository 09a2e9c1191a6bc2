"""The recorded checkpoints of the real DeepSpeed (tests/data/deepspeed_checkpoints), unpacked."""
import os
import pathlib
import tarfile

from unshard.checkpoint.torch_file import loaded, read_torch_file

DATA = pathlib.Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"
VARIANTS = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))
# The optimizer's groups of the recorded model; stage 0 doesn't name them.
GROUPS = [["embed.weight", "mid.weight"], ["mid.bias", "norm.weight", "norm.bias"]]
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def unpack(variant, folder):
    """(folder of the tag, what DeepSpeed's own functions said)."""
    with tarfile.open(DATA / f"{variant}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    tag = "universal" if "universal" in variant else (pathlib.Path(folder) / "latest").read_text()
    return os.path.join(folder, tag), loaded(read_torch_file(os.path.join(folder, "expected.pt")))
