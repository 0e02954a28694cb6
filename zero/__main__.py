"""`python -m zero` is the command `zero`."""

from zero.tools.cli import main

if __name__ == "__main__":
    main()
