import sys

from unshard.launcher import main

if __name__ == "__main__":
    sys.exit(main())
