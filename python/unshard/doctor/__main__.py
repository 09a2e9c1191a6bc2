import sys

from unshard.doctor import main

if __name__ == "__main__":
    sys.exit(main())
