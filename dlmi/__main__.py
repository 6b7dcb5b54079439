"""`python -m dlmi`."""

from dlmi.cli import main

if __name__ == "__main__":
    main()
