"""The logger named DeepSpeed, as scripts know it."""
import logging
import sys

import torch.distributed as dist


def _make_logger():
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


logger = _make_logger()


def log_dist(message, ranks=None, level=logging.INFO):
    """Log on the given ranks only (default, or -1 among them: all)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, f"[Rank {rank}] {message}")
