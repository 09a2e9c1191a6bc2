"""deepspeed.utils.zero_to_torch, also `python -m`."""
import sys

from unshard.checkpoint.consolidate import convert_zero_checkpoint_to_state_dict as _convert
from unshard.checkpoint.zero_to_fp32_script import main as _main


def main(args=None):
    return _main(args, _convert, asks_dtype=True)


if __name__ == "__main__":
    sys.exit(main())
