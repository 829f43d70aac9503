"""`python -m superfluid` is the `superfluid` command."""

from superfluid.cli.main import main

if __name__ == "__main__":
    main()
