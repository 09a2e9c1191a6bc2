"""`ds_ssh`: one command on every host."""
import sys


def main(argv=None):
    from unshard.launcher.everywhere import main as everywhere

    sys.exit(everywhere(argv, prog="ds_ssh"))


if __name__ == "__main__":
    main()
