"""`deepspeed`, `ds`, `deepspeed.pt` and `python -m deepspeed.launcher.runner`: Unshard's launcher under DeepSpeed's name."""
import os
import sys

from unshard.launcher.hosts import read_hostfile, select
from unshard.launcher.options import HOSTFILE, build_parser

DLTS_HOSTFILE = HOSTFILE
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")     # accelerate's launcher appends to that file


def parse_args(args=None):
    return build_parser("deepspeed").parse_args(args)


def fetch_hostfile(hostfile_path):
    """{host: number of slots}, None where there is no such file."""
    return read_hostfile(hostfile_path)


def parse_resource_filter(host_info, include_str="", exclude_str=""):
    """The part of {host: [slot, ...]} that the filters leave."""
    return select(host_info, include_str, exclude_str) if include_str or exclude_str else host_info


def parse_inclusion_exclusion(resource_pool, inclusion, exclusion):
    """As parse_resource_filter, from {host: number of slots}."""
    return parse_resource_filter({host: list(range(slots)) for host, slots in resource_pool.items()}, inclusion, exclusion)


def main(args=None):
    from unshard.launcher import main as launch

    sys.exit(launch(args, prog="deepspeed"))


if __name__ == "__main__":
    main()
