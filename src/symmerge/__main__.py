"""`python -m symmerge`, and with it `torchrun -m symmerge`."""

from symmerge.cli import main

if __name__ == "__main__":
    main()
