"""Write golden.json, and the table made from it, with the figures that the kernels have now.

python tests/compile/write_golden.py
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.compile.triton_settings import fresh_triton
    from tests.support.processes.ancestry import short_head

    with fresh_triton():
        import triton

        from tests.compile.compile_cases import GOLDEN, binaries_of, cases_of
        from tests.compile.compile_table import TABLE, table_of
        from tests.compile.decode_compile_cases import decode_figures
        from tests.compile.module_compile_cases import module_figures
        from tests.compile.sampling_compile_cases import sampling_figures
        from tests.compile.triton_stub import CHIPS

        figures = {
            chip: {
                str(case): {op: binary.figures for op, binary in binaries_of(chip, case).items()}
                for case in cases_of(chip)
            }
            for chip in CHIPS
        }
        known = {
            "triton": triton.__version__,
            "commit": short_head(),
            "figures": figures,
            "sampling": sampling_figures(),
            "decoding": decode_figures(),
            "modules": module_figures(),
        }
    GOLDEN.write_text(_as_json(known), encoding="utf-8")
    TABLE.write_text(table_of(known), encoding="utf-8")


def _as_json(value: Any, depth: int = 0) -> str:
    """JSON with the figures of a binary on one line, so that a change shows as one."""
    if depth == 4 or not isinstance(value, dict):
        return json.dumps(value) + "\n" * (depth == 0)
    indent = "  " * (depth + 1)
    entries = [f"{indent}{json.dumps(key)}: {_as_json(item, depth + 1)}" for key, item in value.items()]
    return "{\n" + ",\n".join(entries) + "\n" + "  " * depth + "}" + "\n" * (depth == 0)


if __name__ == "__main__":
    main()
