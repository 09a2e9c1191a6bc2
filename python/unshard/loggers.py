"""The Python logger that scripts know by DeepSpeed's name, and helpers that log on some ranks only."""
import functools
import json
import logging
import sys

import torch.distributed as dist

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR, "critical": logging.CRITICAL}


def create_logger(name="DeepSpeed", level=logging.INFO):
    """A logger to standard error, set up once."""
    made = logging.getLogger(name)
    if not made.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(level)
        made.propagate = False
    return made


logger = create_logger()


def _is_for(ranks):
    """(whether this rank is meant, its number)"""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return not ranks or -1 in ranks or rank in ranks, rank


def log_dist(message, ranks=None, level=logging.INFO):
    """Log on the given ranks only (default, or -1 among them: all)."""
    meant, rank = _is_for(ranks)
    if meant:
        logger.log(level, f"[Rank {rank}] {message}")


@functools.lru_cache(maxsize=1024)
def _once(message, ranks, level):
    log_dist(message, ranks, level)


def log_dist_once(message, ranks=None, level=logging.INFO):
    """The same text for the same ranks once only."""
    _once(message, None if ranks is None else tuple(ranks), level)


def print_dist(message, ranks=None):
    """Print on the given ranks only."""
    meant, rank = _is_for(ranks)
    if meant:
        print(f"[Rank {rank}] {message}")


def print_json_dist(message, ranks=None, path=None):
    """Write a dict as JSON to `path` on the given ranks."""
    meant, rank = _is_for(ranks)
    if meant:
        with open(path, "w") as file:
            json.dump({**message, "rank": rank}, file)


@functools.lru_cache(maxsize=1024)
def warning_once(message):
    """The same text once only."""
    logger.warning(message)


def level_of(name):
    """logging's number of a level's name. Raises ValueError."""
    if name.lower() not in LEVELS:
        raise ValueError(f"[logging] '{name}' isn't a level; accepted: {', '.join(LEVELS)}")
    return LEVELS[name.lower()]


def set_log_level_from_string(log_level_str, custom_logger=None):
    """Set the level of the logger and its handlers."""
    chosen = custom_logger or logger
    for one in (chosen, *chosen.handlers):
        one.setLevel(level_of(log_level_str))


def get_current_level():
    """The logger's level, as logging's number."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str):
    """Whether the logger's level is that or a more talkative one."""
    return logger.getEffectiveLevel() <= level_of(max_log_level_str)
