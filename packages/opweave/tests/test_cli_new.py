"""``opweave new``: packages that pass their tests, fit an index, and live side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from email import message_from_bytes
from pathlib import Path

import pytest

from opweave.cli import main
from opweave.cli.new import create
from opweave.packages import is_installed
from support.warm_python import warm_python

COMMAND = "import sys; from opweave.cli import main; main(sys.argv[1:])"
# Of a package's tests; the slow test below runs all of them.
QUICK = "runs_by_default or metadata or predicate or layer or contract or capabilities"
WHEEL = ("-m", "pip", "wheel", "-q", "--no-deps", "-w", "wheels")
OFFLINE = ("--no-build-isolation", "--no-index")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def new(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["new", *arguments])
    return int(exit_.value.code or 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here: Path) -> Run:
    """Run Python in an empty folder, with *paths* before all others; it must succeed."""

    def run(
        *arguments: str, paths: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([*(str(here / each) for each in paths), *filter(None, sys.path)])
        env = {**os.environ, "PYTHONPATH": path, "OPWEAVE_CACHE_DIR": str(here / "cache")}
        done = warm_python().run(*arguments, cwd=here, env={**env, **variables})
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def install(name: str, points: Mapping[str, str]) -> None:
    """Make a package in the working directory as good as installed."""
    info = Path(name, "src", f"{name}-0.1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = [f"[opweave.{group}]\n{name} = {name}:{value}\n" for group, value in points.items()]
    (info / "entry_points.txt").write_text("".join(lines))


def test_a_new_package(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert new("demo") == 0
    text = capfd.readouterr().out
    assert "demo/src/demo/kernel.py" in text
    assert "Now: pip install -e './demo[test]' && pytest demo && opweave ops demo_softcap" in text
    assert new("full", "--kernel", "cpp", "--device", "--layer", "--json") == 0
    created = json.loads(capfd.readouterr().out)
    files = {path for path in here.rglob("*") if path.is_file()}
    assert created["name"] == "full"
    assert {Path(path) for path in created["files"]} == {p for p in files if "full" in p.parts}
    words = {"demo": ("layer", "platform", "opweave-native"), "full": ("{{", "{%", "demo")}
    for path in files:
        for word in words[path.relative_to(here).parts[0]]:
            assert word not in path.read_text("utf-8").lower().replace("{{name", ""), path
    device = (here / "full/src/full/device.py").read_text("utf-8")
    assert len(device.splitlines()) < 100


def test_the_packages_tests(run: Run) -> None:
    create("plain", Path(), kernel="python", layer=True)
    options = ("-q", "-p", "no:cacheprovider", "-k", QUICK)
    done = run("-m", "pytest", "plain", *options)
    assert "4 passed" in done.stdout
    create("nova", Path(), kernel="python", device=True)
    install("nova", {"general_plugins": "register", "platform_plugins": "claim"})
    done = run("-m", "pytest", "nova", *options, paths=("nova/src",))
    assert "5 passed" in done.stdout


def test_the_triton_packages_tests(here: Path) -> None:
    if not is_installed("triton"):
        pytest.skip("make test-triton runs this test")
    create("gamma", Path(), kernel="triton")
    # A warm interpreter has imported Triton already, and Triton reads TRITON_INTERPRET only then.
    command = [sys.executable, "-m", "pytest", "gamma", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


SIDE_BY_SIDE = """
    import sys, torch
    from importlib import import_module
    from opweave import ir
    from opweave.cli import main

    x = torch.randn(3, 8)
    with torch.no_grad(), ir.record() as record:
        for name in sys.argv[1:]:
            op = getattr(import_module(f"{name}.op"), f"{name}_softcap")
            torch.testing.assert_close(op(x, 2.0), op.native(x, 2.0))
    assert record.selected_impls == {f"{name}_softcap": {name: 1} for name in sys.argv[1:]}
    main(["doctor"])  # exits with 1 after a problem
"""


def test_two_packages_side_by_side(run: Run) -> None:
    points = {"general_plugins": "register", "platform_plugins": "claim"}
    for name in ("nova", "opal"):
        create(name, Path(), kernel="python", device=True, layer=name == "opal")
        install(name, points)
    code = textwrap.dedent(SIDE_BY_SIDE)
    paths = ("nova/src", "opal/src")
    done = run("-c", code, "nova", "opal", paths=paths)
    assert "opal_softcap:opal" in done.stdout
    # Each device is used on request.
    done = run("-c", COMMAND, "doctor", paths=paths, OPAL_SIMULATED="1")
    assert "it is simulated" in done.stdout


DEVICE = """
    import torch
    from nova.op import nova_softcap
    from opweave import ir
    from opweave.platforms import current_platform

    assert current_platform.device_type == "nova"
    x = torch.randn(4, 6).to("nova")
    assert str(x.device) == "nova:0"
    x[1:, ::2].add_(1)  # a view
    y = x.t() @ torch.ones(4, 6, device="nova")
    torch.testing.assert_close(y.cpu(), x.cpu().t() @ torch.ones(4, 6))
    weight = torch.ones(6, device="nova", requires_grad=True)
    (x * weight).square().sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), 2 * x.cpu().square().sum(0))
    windows = torch.cat([x, x]).unfold(1, 2, 1)
    assert torch.equal(windows.cpu(), torch.cat([x.cpu(), x.cpu()]).unfold(1, 2, 1))
    assert torch.empty(0, 3, device="nova").abs().shape == (0, 3)
    with torch.no_grad(), ir.record() as record:
        y = nova_softcap(x, 2.0).cpu()
        torch.testing.assert_close(y, nova_softcap.native(x.cpu(), 2.0))
    assert record.selected_impls == {"nova_softcap": {"nova": 1}}
"""


def test_the_device(run: Run) -> None:
    create("nova", Path(), kernel="python", device=True)
    install("nova", {"general_plugins": "register", "platform_plugins": "claim"})
    run("-c", textwrap.dedent(DEVICE), paths=("nova/src",), NOVA_SIMULATED="1")


def test_the_wheel_is_ready_for_an_index(run: Run, here: Path) -> None:
    create("demo", here, kernel="python")
    run(*WHEEL, *OFFLINE, "./demo")
    with zipfile.ZipFile(here / "wheels" / "demo-0.1.0-py3-none-any.whl") as wheel:
        metadata = message_from_bytes(wheel.read("demo-0.1.0.dist-info/METADATA"))
        assert "MIT License" in wheel.read("demo-0.1.0.dist-info/licenses/LICENSE").decode()
        points = wheel.read("demo-0.1.0.dist-info/entry_points.txt").decode()
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# demo" in metadata.get_payload()
    assert points == "[opweave.general_plugins]\ndemo = demo:register\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_new_packages_in_full(run: Run, here: Path) -> None:
    """Wheels that pip builds in isolation, installed together; each passes all of its tests."""
    create("alpha", here, kernel="cpp")
    create("beta", here, kernel="python", layer=True)
    create("gamma", here, kernel="triton")
    create("delta", here, kernel="cpp", device=True)
    names = ("alpha", "beta", "gamma", "delta")
    run(*WHEEL, *(f"./{name}" for name in names))
    wheels = [str(path) for path in sorted((here / "wheels").iterdir())]
    assert len(wheels) == len(names)
    run("-m", "twine", "check", "--strict", *wheels)
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", "site", *wheels)

    runnable = [name for name in names if name != "gamma" or is_installed("triton")]
    runs = textwrap.dedent(SIDE_BY_SIDE)
    run("-c", runs, *runnable, paths=("site",), TRITON_INTERPRET="1")
    for name in runnable:
        # The installed package, with its C++ module, and not the sources.
        options = ("-q", "-p", "no:cacheprovider", "-o", "pythonpath=")
        run("-m", "pytest", name, *options, paths=("site",))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, "is not a valid name for a package")
            for name in ("Demo", "my-ops", "1st", "lambda", "", "../x", "ops_")
        ),
        *((name, "is taken") for name in ("cpu", "cuda", "native", "json", "opweave", "aten")),
        *((name, "is already installed") for name in ("torch", "pytest")),
        ("there", "already exists; choose another name."),
        (300 * "a", "File name too long"),
    ],
)
def test_bad_names_end_in_one_line(
    name: str, message: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "there").mkdir()
    assert new(name) == 2
    line = capfd.readouterr().err
    assert line.startswith("opweave: ")
    assert line.count("\n") == 1
    assert message in line
    assert [path.name for path in here.iterdir()] == ["there"]


def test_triton_does_not_run_on_a_simulated_device(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert new("demo", "--kernel", "triton", "--device") == 2
    assert "Triton does not run on a device in the memory of the host" in capfd.readouterr().err
    assert not list(here.iterdir())
