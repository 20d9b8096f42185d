"""`python -m qknorm`, which is what torchrun starts."""

from qknorm.cli import main

if __name__ == "__main__":
    main()
