"""Learning-rate schedules."""
from unshard.schedule_arguments import add_tuning_arguments
from unshard.schedules import VALID_LR_SCHEDULES, LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "add_tuning_arguments"]
