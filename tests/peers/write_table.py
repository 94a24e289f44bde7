"""Write benchmarks/results/kernels_peers_interpreter.md with the errors that the kernels have now.

python tests/peers/write_table.py
"""

import datetime
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.peers.peers_figures import TABLE, measured, page_of
    from tests.support.processes.ancestry import short_head

    TABLE.write_text(page_of(measured(), datetime.date.today().isoformat(), short_head()), encoding="utf-8")


if __name__ == "__main__":
    main()
