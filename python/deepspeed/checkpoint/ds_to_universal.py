"""`python -m deepspeed.checkpoint.ds_to_universal`; scripts call main(arguments)."""
import sys

from unshard.checkpoint import universal as _universal
from unshard.checkpoint.universal import parse_arguments

__all__ = ["main", "parse_arguments"]


def main(args=None):
    """Convert as parsed arguments say (any object with input_folder and output_folder). Raises CheckpointError or OSError."""
    _universal.convert(parse_arguments() if args is None else args)


if __name__ == "__main__":
    sys.exit(_universal.main())
