"""The schedules' parameters as options of a command line, for scripts that build their JSON from it."""

# (option, type or None for a switch, default)
_OPTIONS = (
    ("lr_schedule", str, None),
    ("lr_range_test_min_lr", float, 0.001), ("lr_range_test_step_rate", float, 1.0), ("lr_range_test_step_size", int, 1000),
    ("lr_range_test_staircase", None, False),
    ("cycle_first_step_size", int, 1000), ("cycle_first_stair_count", int, -1), ("cycle_second_step_size", int, -1),
    ("cycle_second_stair_count", int, -1), ("decay_step_size", int, 1000), ("cycle_min_lr", float, 0.01), ("cycle_max_lr", float, 0.1),
    ("decay_lr_rate", float, 0.0), ("cycle_momentum", None, False), ("cycle_min_mom", float, 0.8), ("cycle_max_mom", float, 0.9),
    ("decay_mom_rate", float, 0.0),
    ("warmup_min_lr", float, 0), ("warmup_max_lr", float, 0.001), ("warmup_num_steps", int, 1000), ("warmup_type", str, "log"),
    ("warmup_min_ratio", float, 0.01), ("cos_min_ratio", float, 0.01),
)


def add_tuning_arguments(parser):
    """Add them to an argparse parser. Returns it."""
    group = parser.add_argument_group("Learning-rate schedule", "parameters of the schedule that --lr_schedule names")
    for name, kind, default in _OPTIONS:
        how = {"action": "store_true"} if kind is None else {"type": kind}
        group.add_argument(f"--{name}", default=default, help=f"default: {default}", **how)
    return parser
