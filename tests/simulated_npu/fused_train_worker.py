"""Run by torchrun on simulated NPUs: train_worker.py, with torch-npu's fused ops as their documents define them.

Each rank prints "heads {...}": how often npu_fusion_attention was called, by the number of its heads.
"""

import json
from collections import Counter
from typing import Any

from torch import Tensor

from hwgrpo.cli.process_exit import ended_as_rank
from tests.support.numbers import npu_reference_ops
from tests.support.runs import train_worker

ATTENTION = "npu_fusion_attention"


def main() -> None:
    heads: Counter[int] = Counter()
    plain = npu_reference_ops.OPS[ATTENTION]

    def counted(query: Tensor, key: Tensor, value: Tensor, head_num: int, *more: Any, **options: Any) -> Any:
        heads[head_num] += 1
        return plain(query, key, value, head_num, *more, **options)

    npu_reference_ops.OPS[ATTENTION] = counted
    with npu_reference_ops.registered():
        train_worker.main()
    print(f"heads {json.dumps(heads)}", flush=True)


if __name__ == "__main__":
    with ended_as_rank():
        main()
