"""`ds_report`, `dsr` and `python -m deepspeed.env_report`: `unshard report` under DeepSpeed's name."""
import sys


def main(argv=None):
    """Print what runs here, on what, and what is wrong with it."""
    from unshard.report import main as report

    sys.exit(report(argv, prog="ds_report"))


cli_main = main

if __name__ == "__main__":
    main()
