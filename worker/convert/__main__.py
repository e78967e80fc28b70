"""`python -m worker.convert`, the same as `llorch-convert`."""

from worker.convert.cli import main

if __name__ == "__main__":
    main()
