"""The page of the H100 says what its measurements say."""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PAGE = (RESULTS / "h100.md").read_text(encoding="utf-8")


def test_the_table_of_kernels_is_that_of_the_samples():
    [shape] = json.loads((RESULTS / "kernels_h100.json").read_text(encoding="utf-8"))["shapes"]
    timed = {
        (case["name"], side["name"]): side
        for case in shape["cases"]
        for side in case["sides"]
        if side["state"] == "timed"
    }
    case, rows = "", re.findall(r"^\|.*\|$", PAGE.split("## Kernels")[1].split("**Tiles**")[0], flags=re.MULTILINE)[2:]
    assert len(rows) > 30
    for row in rows:
        named, side, ms, speed, ceiling, peak = (cell.strip() for cell in row.strip("|").split("|"))
        case = named or case
        found = timed[case, re.sub(r"\*|\(ours\)", "", side).strip()]
        assert abs(float(ms) - found["median_s"] * 1e3) <= 5e-3 * float(ms), row
        assert speed == f"{found['ratio']:.2f}x", row
        assert ceiling == f"{found['share_of_ceiling']:.0%}", row
        assert peak == f"{found['peak_bytes'] / 2**20:,.0f}", row
    ours, trl = (timed["linear_token_loss", side]["median_s"] for side in ("triton", "TRL chunked"))
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"On an H100 the loss with gradients takes {ours / trl:.2f} times as long as TRL's" in readme
