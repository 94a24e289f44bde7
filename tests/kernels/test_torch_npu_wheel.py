"""What our code calls is in the torch-npu that set-up installs: read from its wheel, which needs no NPU."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import npu_reference_ops
import pytest
import yaml
from hwgrpo_kernels import npu_scoring
from torch_npu_schema import SCHEMA

CONSTRAINTS = Path(__file__).parents[2] / "scripts" / "constraints" / "npu.txt"
OPS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


@pytest.mark.slow
def test_the_fused_ops_have_the_schemas_our_tests_call_them_by(tmp_path):
    [pin] = re.findall(r"^torch-npu==.+$", CONSTRAINTS.read_text(), re.MULTILINE)
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(tmp_path), pin]
    result = subprocess.run(download, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, f"cannot get {pin}, 44 MB, from the index pip is configured with: {result.stderr}"
    [wheel] = tmp_path.glob("torch_npu-*.whl")
    sections = yaml.safe_load(zipfile.ZipFile(wheel).read(OPS)).values()
    entries = [each for section in sections if isinstance(section, list) for each in section if isinstance(each, dict)]
    expected = {npu_scoring.OP: SCHEMA, **npu_reference_ops.SCHEMAS}
    functions = [str(each.get("func", "")) for each in entries]
    for op, schema in expected.items():
        assert [each for each in functions if each.startswith(f"{op}(")] == [schema]
