"""`python -m kvsieve` is the `kvsieve` command."""

from kvsieve.cli.main import main

if __name__ == "__main__":
    main()
