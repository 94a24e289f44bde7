"""The core names no device: the lint holds on the tree, and finds each kind of word when one is planted."""

import importlib.util
from pathlib import Path

REPO = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("device_words", Path(__file__).with_name("device_words.py"))
assert _spec is not None
assert _spec.loader is not None
device_words = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(device_words)


def test_the_core_names_no_device():
    assert len(list((REPO / "hwgrpo").rglob("*.py"))) > 3, "the lint looked at nothing"
    assert device_words.check_tree(REPO / "hwgrpo") == []


PLANTED = (
    ("free = torch.cuda.mem_get_info()", "torch.cuda"),
    ("stream = torch.npu.Stream()", "torch.npu"),
    ("model = model.cuda()", ".cuda()"),
    ("model = build().npu(0)", ".npu()"),
    ("import torch_npu", "import torch_npu"),
    ("import torch.cuda.nvtx as nvtx", "import torch.cuda.nvtx"),
    ("from torch import cuda", "from torch import cuda"),
    ("from torch.npu import Event", "from torch.npu import Event"),
    ("device = 'cuda'", "the string 'cuda'"),
    ("device = f'npu:{rank}'", "the string 'npu:'"),
    ("device = torch.device('cuda:0')", "the string 'cuda:0'"),
    ("dist.init_process_group('hccl')", "the string 'hccl'"),
    ("if backend in ('nccl', 'gloo'): pass", "the string 'nccl'"),
    ("module = getattr(torch, 'hip')", "the string 'hip'"),
    ("name = {'rocm': 1}", "the string 'rocm'"),
    ("module = import_module('torch.cuda.nccl')", "the string 'torch.cuda.nccl'"),
)


def test_a_planted_device_word_is_found():
    for line, what in PLANTED:
        assert device_words.check_source(f"import torch\n\n{line}\n") == [(3, what)]


def test_words_in_docstrings_comments_and_other_strings_are_allowed():
    source = (
        '"""cuda"""\nx = 1  # cuda\n"""npu"""\ny = "a cuda device"\n\n\ndef f():\n    "nccl"\n    return acuda.cudart\n'
    )
    assert device_words.check_source(source) == []


def test_a_reason_on_the_line_excuses_its_words():
    assert device_words.check_source("kind = 'nccl'  # hw: the engine's name for its transfer backend\n") == []


def test_an_excuse_covers_only_its_own_line():
    assert device_words.check_source("a = 1  # hw: reason\nkind = 'nccl'\n") == [
        (1, "an excuse `# hw:` on a line without a device word"),
        (2, "the string 'nccl'"),
    ]


def test_an_excuse_without_a_reason_is_a_finding():
    assert device_words.check_source("kind = 'nccl'  # hw:\n") == [(1, "an excuse `# hw:` without a reason")]


def test_the_tree_check_names_file_and_line(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "module.py").write_text("\nx = 'npu'\n")
    assert device_words.check_tree(tmp_path) == [f"{tmp_path / 'deep' / 'module.py'}:2: the string 'npu'"]
