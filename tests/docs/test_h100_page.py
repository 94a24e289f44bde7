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


def test_the_goals_of_the_head_follow_from_the_rates_and_bytes():
    rows, chunks, rates = 8192, 2, {896: (151936, 704e12), 3584: (152064, 756e12)}
    copy = 2.94e12
    modelled = []
    for hidden, (vocab, gemm) in rates.items():
        products, read = 6 * rows * hidden * vocab / gemm, 2 * rows * vocab / copy
        weight = 2 * 4 * hidden * vocab * (chunks - 1) / copy
        modelled.append([products, 3 * read, weight, products + 3 * read + weight])
    section = PAGE.split("**Goals of the head**")[1].split("\n## ")[0]
    table = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \|$", section, flags=re.MULTILINE)
    assert table == [tuple(f"{1e3 * each:.2f}" for each in row) for row in zip(*modelled, strict=True)]
    shares = [f"{each[0] / each[3]:.0%}" for each in modelled]
    assert f"the design allows {' and '.join(shares)} at the rates above" in section
    saved, small, large = 1e3 * modelled[0][1] / 3, *(each[1] / 3 / each[3] for each in modelled)
    assert (
        f"{saved:.2f} ms: at most {small:.0%} of the sums above at 896 hidden units and {large:.0%} at 3,584" in section
    )
    programs, xcd = 2 * 151936 * 132 / 1e6, 2 * 151936 * 38 / 1e6
    assert f"132 programs hold {programs:.0f} MB of bf16 logits, or {2 * programs:.0f} of fp32" in section
    assert f"38 programs with {xcd:.1f}" in section
