"""``python -m kvsan`` is the command ``kvsan``."""

from kvsan.cli import main

if __name__ == "__main__":
    main()
