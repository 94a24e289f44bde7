"""What installed distributions offer: a damaged list is told of, and hides no other."""

import pytest
from hwgrpo_kernels.entry_points import find

METADATA = b"Metadata-Version: 2.1\nName: %s\nVersion: 1.0\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts distributions into a folder that comes behind those put there before."""

    def install(folder, name, entry_points, metadata=METADATA):
        info = tmp_path / folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_bytes(metadata.replace(b"%s", name.encode()))
        (info / "entry_points.txt").write_bytes(entry_points)

    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second")])
    return install


def values():
    return [point.value for point in find("some.kernels").points]


def test_only_the_group_is_taken_and_lists_without_it_are_not_judged(install):
    install("first", "one", b"[some.kernels]\na = one:A\nb = one:B\n[other]\nc = one:C\n")
    install("first", "two", b"[other]\nno pair\n")
    assert values() == ["one:A", "one:B"]
    assert find("some.kernels").damaged == {}


def test_of_a_distribution_that_is_there_twice_the_first_counts(install):
    install("first", "one", b"[some.kernels]\na = one:A\n")
    install("second", "one", b"[some.kernels]\na = one:OLD\n")
    assert values() == ["one:A"]
    install("first", "two", b"[some.kernels]\na = two:A\n")
    install("second", "two", b"\xff\xfe")
    assert find("some.kernels").damaged == {}


def test_a_distribution_whose_record_is_damaged_as_well_is_told(install):
    install("first", "one", b"\xff[some.kernels]", metadata=b"\xff\xfe")
    install("second", "two", b"[some.kernels]\na = two:A\n")
    assert values() == ["two:A"]
    [told] = find("some.kernels").damaged.items()
    assert told[0] == "unknown distribution"
    assert "UnicodeDecodeError" in told[1]
