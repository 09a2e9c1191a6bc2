"""The logger named DeepSpeed, as scripts know it."""
from unshard.loggers import LEVELS as log_levels
from unshard.loggers import (create_logger, get_current_level, log_dist, log_dist_once, logger, print_dist, print_json_dist,
                             set_log_level_from_string, should_log_le, warning_once)
from unshard.loggers import level_of as get_log_level_from_string


class LoggerFactory:
    """Loggers by name."""

    create_logger = staticmethod(create_logger)


__all__ = ["LoggerFactory", "create_logger", "get_current_level", "get_log_level_from_string", "log_dist", "log_dist_once",
           "log_levels", "logger", "print_dist", "print_json_dist", "set_log_level_from_string", "should_log_le", "warning_once"]
