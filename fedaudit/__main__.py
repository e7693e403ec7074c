"""`python -m fedaudit`: the command line, also from a bare checkout."""

from fedaudit.cli.main import main

if __name__ == "__main__":
    main()
