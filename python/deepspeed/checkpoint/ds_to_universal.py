"""`python -m deepspeed.checkpoint.ds_to_universal`."""
import sys

from unshard.checkpoint.universal import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
