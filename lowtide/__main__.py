"""``python -m lowtide`` is the ``lowtide`` command."""

from lowtide.cli.app import main

if __name__ == "__main__":
    main()
