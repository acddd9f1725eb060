"""What an installed Lockstep has: all that it reads at run time comes with the wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("serve", "cluster", "model", "compile")
BUNDLED = "serve/bundled/tiny"
"""Where the model of examples/tiny lies in the wheel."""
READS = """
import json
from pathlib import Path
from model.kernels.cpu.native import SOURCES
from serve.observe import page
from serve.config import bundled_model
from serve.requests.tokenizer import Tokenizer

tokenizer = Tokenizer.from_dir(bundled_model())
print(json.dumps({
    "page": [route.path for route in page.routes()],
    "sources": sorted(path.name for path in SOURCES.glob("*")),
    "model": str(bundled_model()),
    "templates": sorted(path.name for path in bundled_model().glob("*.jinja")),
    "serve": page.__file__,
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds of this tree, without the network."""
    pytest.importorskip("hatchling", reason="needs the build backend, which the extra `test` has")
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), *options, "--wheel-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [built] = folder.glob("*.whl")
    return built


def tracked() -> dict[str, Path]:
    """Return the files of the packages and of the bundled model by their names in the wheel."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout, found an unpacked archive")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *PACKAGES, "examples/tiny"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    return {name.replace("examples/tiny", BUNDLED): ROOT / name for name in names}


def test_a_wheel_has_every_file_of_the_packages_and_the_model_and_no_other(wheel: Path) -> None:
    wanted = tracked()
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert found == set(wanted)
        for name, path in wanted.items():
            assert archive.read(name) == path.read_bytes(), name


def test_what_is_read_at_run_time_is_found_beside_an_installed_package(
    wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    # Isolated: neither this tree nor PYTHONPATH is looked at.
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r})\n{READS}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["serve"].startswith(str(tmp_path))
    assert found["page"] == ["/", "/page.css", "/page.js"]
    assert "simd.h" in found["sources"] and len(found["sources"]) > 3
    assert found["model"] == str(tmp_path / "installed" / BUNDLED)
    assert found["templates"] == ["chat_template.jinja"]
