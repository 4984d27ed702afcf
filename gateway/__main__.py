"""`python -P -m gateway` is the command `mlxd`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
