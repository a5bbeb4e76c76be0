"""`python -m labkit.cli`."""

from labkit.cli import main

if __name__ == "__main__":
    main()
