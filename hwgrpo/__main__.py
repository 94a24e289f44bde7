"""`python -m hwgrpo` is the `hwgrpo` command."""

import sys
from typing import NoReturn

from hwgrpo.cli.process_exit import ended_as_rank


def run() -> NoReturn:
    """Run the command line as this process."""
    with ended_as_rank():
        try:
            from hwgrpo.cli.main import main, report_fault
        except KeyboardInterrupt:
            raise SystemExit(130) from None

        sys.excepthook = report_fault
        raise SystemExit(main())


if __name__ == "__main__":
    run()
