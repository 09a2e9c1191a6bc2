"""How many GPUs there are."""
import glob

# Where any driver of a GPU that torch.cuda counts shows itself: NVIDIA's, its Tegra's, Windows' under WSL, AMD's.
DRIVER_FILES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/dxg", "/dev/kfd")


def device_count():
    """GPUs that this process may use. Costs the import of torch, but on machines without any."""
    if not any(glob.glob(pattern) for pattern in DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count()
