"""`python -m dlmi`."""

from dlmi.cli.main import main

if __name__ == "__main__":
    main()
