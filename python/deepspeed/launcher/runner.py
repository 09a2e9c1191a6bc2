"""`deepspeed`, `ds`, `deepspeed.pt` and `python -m deepspeed.launcher.runner`: Unshard's launcher under DeepSpeed's name."""
import sys


def main(args=None):
    from unshard.launcher import main as launch

    sys.exit(launch(args, prog="deepspeed"))


if __name__ == "__main__":
    main()
