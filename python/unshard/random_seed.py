"""One seed for every generator of a process."""
import random

import torch


def set_random_seed(seed):
    """Python's, numpy's (where it is installed) and torch's on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)
