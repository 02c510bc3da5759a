"""``python -m opweave``: the command line."""

from opweave.cli import main

if __name__ == "__main__":
    main()
