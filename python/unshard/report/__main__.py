import sys

from unshard.report import main

if __name__ == "__main__":
    sys.exit(main())
