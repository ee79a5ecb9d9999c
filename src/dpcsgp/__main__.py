"""`python -m dpcsgp`: the same as the `dpcsgp` command."""

from dpcsgp.cli.main import app

if __name__ == "__main__":
    app()
