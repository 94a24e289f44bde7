"""`python -m hwgrpo` is the `hwgrpo` command."""

from typing import NoReturn

from hwgrpo.cli.leaving import ended_as_rank


def run() -> NoReturn:
    """Run the command line as the whole of this process."""
    with ended_as_rank():
        from hwgrpo.cli.main import main

        raise SystemExit(main())


if __name__ == "__main__":
    run()
