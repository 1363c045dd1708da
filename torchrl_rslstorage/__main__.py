"""``python -m torchrl_rslstorage`` is ``rslstorage``."""

from torchrl_rslstorage.cli import main

if __name__ == "__main__":
    main()
