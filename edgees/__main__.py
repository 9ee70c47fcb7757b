"""``python -m edgees``: the same as the ``edgees`` command."""

from edgees.cli import main

if __name__ == "__main__":
    main()
