"""`unshard doctor`: from all ranks' records the first point where they differ, who is slow, and which link is.

    unshard doctor RUN_DIR [RUN_DIR...] [--json]     records that ranks wrote (see docs/diagnosis.md)
    unshard doctor PID [--json]                      a launcher or a rank on this host: its ranks are asked to write theirs now

    load -> Records -> compare, stragglers, links, position (functions of dicts) -> diagnose -> words
"""
from unshard.doctor.command import main
from unshard.doctor.diagnose import diagnose
from unshard.doctor.load import load_folders
from unshard.doctor.words import describe

__all__ = ["describe", "diagnose", "load_folders", "main"]
