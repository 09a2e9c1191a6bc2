"""`ds_bench`: `unshard bench comm` under DeepSpeed's name."""
import sys


def main(argv=None):
    from unshard.bench_comm import main as bench_comm

    sys.exit(bench_comm(argv))


if __name__ == "__main__":
    main()
