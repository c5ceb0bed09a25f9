"""The package around the backend: what is built, shipped, registered and refused."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dreamcomm import _build_info
from dreamcomm._torch import build_check

ROOT = Path(__file__).parents[2]
TOOLS = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
# Stands in for a wheel that was built for a torch which is not installed.
FOREIGN_BUILD = """
import sys, types
info = types.ModuleType("dreamcomm._build_info")
info.TORCH_VERSION = "2.99.1+cpu"
sys.modules[info.__name__] = info
"""


def run(*command: str, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=TOOLS, capture_output=True, text=True)


def run_python(code: str, **environment: str) -> str:
    """Standard output of a new interpreter, which must end well and complain of nothing."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**TOOLS, **environment},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize("running", ["2.13.0+cpu", "2.13.0+cu130", "2.13.1", "2.13.0a0+git1234"])
def test_a_torch_of_the_same_minor_version_fits(running: str) -> None:
    build_check.check_torch("2.13.0+cpu", running)


@pytest.mark.parametrize("running", ["2.12.1+cpu", "2.14.1+cu130", "3.13.0", "2.1.3"])
def test_another_torch_is_named_in_one_line_with_the_remedy(running: str) -> None:
    with pytest.raises(ImportError) as caught:
        build_check.check_torch("2.13.0+cpu", running)
    line = str(caught.value)
    assert "\n" not in line
    assert "built for torch 2.13.0+cpu" in line
    assert f"torch {running} is installed" in line
    assert "pip install --force-reinstall --no-deps ." in line
    assert "install torch 2.13" in line


def test_the_build_is_the_one_of_the_installed_torch() -> None:
    assert torch.__version__ == _build_info.TORCH_VERSION
    build_check.check_build()


def test_a_foreign_build_is_refused_before_its_module_is_loaded() -> None:
    code = """
import torch
try:
    torch.distributed.init_process_group(
        "dreamcomm", store=torch.distributed.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
print("dreamcomm._C" in sys.modules)
"""
    line, loaded = run_python(FOREIGN_BUILD + code).splitlines()
    assert "built for torch 2.99.1+cpu" in line
    assert f"torch {torch.__version__} is installed" in line
    assert loaded == "False"


def test_what_stands_before_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("torch")
    other.__file__ = "/home/me/torch.py"
    monkeypatch.setitem(sys.modules, "torch", other)
    with pytest.raises(ImportError, match="is not PyTorch: /home/me/torch"):
        build_check.check_build()


def test_torch_can_be_imported_beside_a_foreign_build() -> None:
    assert run_python(FOREIGN_BUILD + "import torch; print('fine')") == "fine"


def test_the_source_folder_without_a_build_says_so() -> None:
    # Python's own finders are classes; the one of an editable install is an instance.
    code = f"""
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
sys.path.insert(0, {str(ROOT)!r})
from dreamcomm._torch import build_check
try:
    build_check.check_build()
except ImportError as error:
    print(error)
"""
    line = run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert f"dreamcomm is not built in {ROOT / 'dreamcomm'}: run `pip install .`" in line
    assert "\n" not in line


def test_torch_calls_the_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch.backends", name="dreamcomm")
    assert entry.value == "dreamcomm.backend:autoload"
    code = """
import torch
print("dreamcomm" in torch.distributed.Backend.backend_list)
config = torch.distributed.BackendConfig(torch.distributed.Backend("cpu:dreamcomm,cuda:nccl"))
print(config.get_device_backend_map())
"""
    known, mapping = run_python(
        "import warnings; warnings.simplefilter('ignore')" + code
    ).splitlines()
    assert known == "True"
    assert mapping == "{'cpu': 'dreamcomm', 'cuda': 'nccl'}"


def test_a_group_of_the_name_alone_serves_the_devices_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count, devices in ((0, ["cpu"]), (2, ["cpu", "cuda"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda found=count: found)
        made = torch.distributed.BackendConfig(torch.distributed.Backend("dreamcomm"))
        assert list(made.get_device_backend_map()) == devices


def test_the_entry_point_loads_neither_the_compiled_module_nor_the_launcher() -> None:
    code = "import sys, torch; print(sorted(m for m in sys.modules if m.startswith('dreamcomm.')))"
    loaded = run_python(code)
    assert "'dreamcomm.backend'" in loaded
    assert "'dreamcomm._C'" not in loaded
    assert "'dreamcomm.launch'" not in loaded


def test_other_frameworks_and_the_calls_on_their_arrays_are_not_imported() -> None:
    """Attempts count: the frameworks are not installed everywhere."""
    code = """
import sys
class Attempts:
    seen = []
    def find_spec(self, name, path=None, target=None):
        if name in ("cupy", "jax", "jaxlib", "keras", "tensorflow"):
            self.seen.append(name)
sys.meta_path.insert(0, Attempts())
import dreamcomm
print([name for name in sys.modules if name.startswith("dreamcomm.arrays")], Attempts.seen)
dreamcomm.Communicator
print("dreamcomm.arrays.communicator" in sys.modules, Attempts.seen)
"""
    assert run_python(code).splitlines() == ["[] []", "True []"]


def test_batches_of_other_backends_are_left_as_they_are() -> None:
    code = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    with dist._coalescing_manager():
        raise KeyError("the program's own")
except KeyError as error:
    print(error, "dreamcomm._C" in sys.modules)
dist.destroy_process_group()
"""
    assert run_python(code) == '"the program\'s own" False'


def test_an_import_registers_where_torch_was_told_not_to() -> None:
    code = """
import torch
print("dreamcomm" in torch.distributed.Backend.backend_list)
import dreamcomm
print("dreamcomm" in torch.distributed.Backend.backend_list)
"""
    assert run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split() == ["False", "True"]


def test_public_names_are_found_and_others_are_not() -> None:
    code = """
import dreamcomm
assert set(dreamcomm.__all__) <= set(dir(dreamcomm))
found = [getattr(dreamcomm, name).__name__ for name in dreamcomm.__all__]
print([name.removeprefix("dreamcomm.") for name in found] == dreamcomm.__all__)
try:
    dreamcomm.no_such_name
except AttributeError as error:
    print(error)
"""
    found, missing = run_python(code).splitlines()
    assert found == "True"
    assert missing == "module 'dreamcomm' has no attribute 'no_such_name'"


def test_ways_of_training_are_attributes_after_one_import() -> None:
    code = """
import sys
import dreamcomm
names = ["zero", "pipeline", "server", "local_sgd", "gossip"]
print([name for name in names if f"dreamcomm.{name}" in sys.modules])
found = [dreamcomm.zero.ZeroOptimizer, dreamcomm.pipeline.Pipeline, dreamcomm.server.Worker,
         dreamcomm.local_sgd.DiLoCo, dreamcomm.gossip.Gossip]
print([one.__name__ for one in found])
"""
    before, found = run_python(code).splitlines()
    assert before == "[]"  # imported when they are used
    assert found == "['ZeroOptimizer', 'Pipeline', 'Worker', 'DiLoCo', 'Gossip']"


FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "scalar_tensor", "tensor", "zeros"),
)


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    """Under torch.set_default_device it would be made elsewhere."""
    unnamed = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in (ROOT / "dreamcomm").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in FACTORIES
        and not {"device", None} & {given.arg for given in call.keywords}
    ]
    assert unnamed == []


def test_the_compiled_module_needs_no_cuda_library() -> None:
    code = "import torch; from dreamcomm import _C; print(_C.__file__)"
    module = run_python(code, CUDA_VISIBLE_DEVICES="")
    dynamic = run("readelf", "-d", module)
    assert dynamic.returncode == 0
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic.stdout)
    assert needed
    assert not [name for name in needed if re.match(r"lib(cu|nccl|nv|torch_cuda|c10_cuda)", name)]


def build_package(kind: str, settings: dict[str, str], folder: Path) -> Path:
    """Runs the build backend as pip does; the sdist or wheel it made in `folder`."""
    code = f"from scikit_build_core import build; build.build_{kind}({str(folder)!r}, {settings})"
    done = run(sys.executable, "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.iterdir()
    return made


def test_the_sdist_holds_what_a_build_needs_and_nothing_built(tmp_path: Path) -> None:
    with tarfile.open(build_package("sdist", {}, tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    source = (p for f in ("csrc", "cmake", "dreamcomm") for p in (ROOT / f).rglob("*"))
    expected = {str(p.relative_to(ROOT)) for p in source if p.is_file()}
    expected = {name for name in expected if "__pycache__" not in name and not name.endswith(".so")}
    expected |= {"CMakeLists.txt", "pyproject.toml", "LICENSE", "third_party/doctest/LICENSE"}
    assert expected <= names
    unwanted = re.compile(r"(build|dist|shared|\.venv|\.git)/|.*(__pycache__|\.so$|\.o$)")
    assert not [name for name in names if unwanted.match(name)]


def test_the_wheel_holds_the_python_package_alone(tmp_path: Path) -> None:
    """Without its compiled part, which takes long; that one is in use all over the tests."""
    with zipfile.ZipFile(build_package("wheel", {"wheel.cmake": "false"}, tmp_path)) as archive:
        names = set(archive.namelist())
        (entries,) = (name for name in names if name.endswith("dist-info/entry_points.txt"))
        text = archive.read(entries).decode()
    python = {str(p.relative_to(ROOT)) for p in (ROOT / "dreamcomm").rglob("*.py*")}
    assert {n for n in python if "__pycache__" not in n} <= names
    assert {"dreamcomm/py.typed", "dreamcomm/_C.pyi", "dreamcomm/_build_info.pyi"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dreamcomm"}
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    assert "dreamcomm = dreamcomm.backend:autoload" in text


def configure(build: Path, *definitions: str) -> subprocess.CompletedProcess[str]:
    return run("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *definitions)


def test_a_build_without_torch_stops_with_one_line_that_says_what_to_install(
    tmp_path: Path,
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    done = configure(tmp_path / "build", f"-DPython_EXECUTABLE={python}", "-DDREAMCOMM_TORCH_DIR=")
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if "torch" in line and "pip" in line)
    assert f"dreamcomm compiles against the installed torch, and {python} has none" in line
    assert "pip install 'torch>=2.11,<2.15'" in line


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, "holds none: install it first (pip install 'torch>=2.11,<2.15')"),
        ("2.10.3", "holds 2.10.3: pip install 'torch>=2.11,<2.15'"),
        ("2.15.0+cpu", "holds 2.15.0+cpu: pip install 'torch>=2.11,<2.15'"),
    ],
)
def test_a_folder_that_holds_no_torch_in_range_is_named(
    tmp_path: Path, version: str | None, expected: str
) -> None:
    torch_dir = tmp_path / "torch"
    torch_dir.mkdir()
    if version is not None:
        (torch_dir / "version.py").write_text(f"__version__ = '{version}'\n")
        (torch_dir / "lib").mkdir()
        (torch_dir / "lib" / "libtorch_python.so").touch()
    done = configure(
        tmp_path / "build",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DDREAMCOMM_TORCH_DIR={torch_dir}",
    )
    assert done.returncode != 0
    assert f"{torch_dir} {expected}" in done.stderr


def test_torch_is_found_where_pip_hides_the_environment() -> None:
    code = f"""
import runpy, sys
sys.path[:] = [folder for folder in sys.path if not folder.endswith("-packages")]
runpy.run_path({str(ROOT / "cmake" / "find_torch.py")!r}, run_name="__main__")
"""
    assert run_python(code) == str(Path(torch.__file__).parent)


def test_each_floor_sees_the_lower_floors_alone_and_no_torch(tmp_path: Path) -> None:
    lower = {
        "core": set(),
        "transport": {"core"},
        "kernels": {"core"},
        "gpu": {"core", "kernels"},
        "algorithms": {"core", "transport", "kernels"},
        "comm": {"core", "transport", "kernels", "algorithms"},
        "bench": {"core", "transport", "kernels", "algorithms", "comm"},
        "internode": {"core", "transport", "kernels", "algorithms", "comm"},
    }
    # Each source is compiled by itself, since a unity build would join sources of one floor.
    done = configure(tmp_path, f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_UNITY_BUILD=OFF")
    assert done.returncode == 0, done.stderr
    seen: dict[str, set[str]] = {}
    for entry in json.loads((tmp_path / "compile_commands.json").read_text()):
        floor = Path(entry["file"]).relative_to(ROOT / "csrc").parts[0]
        roots = re.findall(r"(?:-I|-isystem) ?(\S+)", entry["command"])
        seen[floor] = {
            str(Path(root).relative_to(tmp_path / "include")) for root in roots if floor != "c10d"
        }
    assert "c10d" in seen
    del seen["c10d"]
    assert seen == {floor: {floor, *below} for floor, below in lower.items()}
    for floor in lower:
        assert [p.name for p in (tmp_path / "include" / floor).iterdir()] == [floor]
