"""``python -m sfu`` is the command ``sfu``."""

from sfu.cli.run import main

if __name__ == "__main__":
    main()
