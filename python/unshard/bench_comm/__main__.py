import sys

from unshard.bench_comm import main

if __name__ == "__main__":
    sys.exit(main())
