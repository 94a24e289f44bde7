"""vLLM's environment with torchvision's Python part: without it vLLM loads no vision-language model.

The index of packages has torchvision as a CUDA build alone, whose compiled part a CPU build of torch cannot load. That
part has no operation that image processors use.
"""

import subprocess
import zipfile
from functools import cache
from pathlib import Path

from tests.vllm.vllm_environment import vllm_python

TORCHVISION = "torchvision==0.28.0"


@cache
def vision_python(folder: Path) -> str:
    """Return the Python of an environment in a folder that has all of vLLM's, and torchvision's Python part."""
    base, environment, parts = vllm_python(), folder / "venv", folder / "parts"
    run(base, "-m", "venv", "--without-pip", str(environment))
    run(base, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder), TORCHVISION)
    (wheel,) = folder.glob("torchvision-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(parts)
    (parts / "torchvision" / "_meta_registrations.py").write_text("")  # it registers operations of the compiled part
    (site,) = environment.glob("lib/python*/site-packages")
    theirs = run(base, "-c", "import site; print(site.getsitepackages()[0])").strip()
    lines = (str(parts), f"import site; site.addsitedir({theirs!r})")
    (site / "vision.pth").write_text("\n".join(lines))
    return str(environment / "bin" / "python")


def run(python: str, *words: str) -> str:
    """Run a command of a Python, and return what it writes."""
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    return done.stdout
