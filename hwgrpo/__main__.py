"""`python -m hwgrpo` is the `hwgrpo` command."""

from hwgrpo.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
