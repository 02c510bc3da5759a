"""``opweave doctor`` and ``opweave plugins``, with packages that are well and that are not."""

from __future__ import annotations

import textwrap

from support.fixtures import Case, FreshCases

RUN = """
import contextlib, io, json, sys
sys.path.insert(0, "site")

def run(*arguments):
    from opweave.cli import main
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main([*arguments])
        except SystemExit as error:
            code = int(error.code or 0)
    assert "Traceback" not in stderr.getvalue(), stderr.getvalue()
    return code, stdout.getvalue()

def doctor():
    code, text = run("doctor", "--json")
    report = json.loads(text)
    assert code == (1 if report["problems"] else 0)
    report["states"] = {each["name"]: each["state"] for each in report["plugins"]}
    told, text = run("doctor")
    assert told == code
    return report, " ".join(text.split())

ACME = {"plugin": "acme", "distribution": "acme-device", "version": "0.1.0"}
"""

REGISTER = """
def register():
    from opweave import ir
    from opweave.config.environment import declare_variable
    from opweave.layers import SiluAndMul

    @ir.ops.silu_and_mul.register_impl("acme")
    def _(x):
        return ir.ops.silu_and_mul.native(x)

    @ir.register_op
    def acme_scale(x: "torch.Tensor") -> "torch.Tensor":
        return x * 2

    @SiluAndMul.register_oot
    class AcmeSiluAndMul(SiluAndMul):
        pass

    declare_variable("ACME_DEPTH", int, 4, "How deep.")

import torch
"""

PLATFORM = """
from opweave.config.patches import ConfigPatch
from opweave.plugins import Claim

def claim():
    return Claim("acme.AcmePlatform", api=1, why="the tests say so")

def __getattr__(name):
    if name != "AcmePlatform":
        raise AttributeError(name)
    from opweave.platforms import CpuPlatform

    class AcmePlatform(CpuPlatform):
        name = "acme"
        dispatch_tags = ("oot", "cpu")

        def extend_cli(self, options):
            options.add("depth", int, 4, "How deep.")

        def extra_passes(self, config=None):
            return ["acme.fold"]

        def doctor(self):
            return {"driver": "1.2.3"}

    globals()[name] = AcmePlatform
    return AcmePlatform

def fold(graph, context):
    pass
"""


def distribution(name: str, points: str, **modules: str) -> dict[str, str]:
    """Return the files of an installed distribution."""
    info = f"site/{name.replace('-', '_')}-0.1.0.dist-info"
    return {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n",
        f"{info}/entry_points.txt": points,
        **{f"site/{module}.py": text for module, text in modules.items()},
    }


def case(code: str, files: dict[str, str]) -> Case:
    return Case(RUN + textwrap.dedent(code), files=files)


GENERAL = "[opweave.general_plugins]\nacme = acme:register\n"
WELL = distribution("acme-device", GENERAL, acme=REGISTER)
CLAIMING = "[opweave.platform_plugins]\nacme = acme:claim\n"


def test_what_is_well(fresh_cases: FreshCases) -> None:
    shown = """
    report, text = doctor()
    assert report["states"] == {"acme": "loaded"}
    assert report["problems"] == []
    [plugin] = report["plugins"]
    assert plugin["distribution"] == "acme-device" and plugin["seconds"] > 0
    owned = {(each["kind"], each["name"]) for each in report["overrides"]}
    assert owned == {
        ("implementation", "silu_and_mul:acme"), ("op", "acme_scale"),
        ("replacement of", "SiluAndMul"), ("environment variable", "ACME_DEPTH"),
    }
    assert all(each["owner"] == ACME for each in report["overrides"])
    assert "silu_and_mul:acme acme (acme-device 0.1.0)" in text and "no problems" in text
    code, text = run("plugins", "list", "--json")
    listed = json.loads(text)
    assert code == 0 and listed["problems"] == []
    assert listed["plugins"][0]["registered"] == plugin["registered"]
    assert "acme-device 0.1.0" in run("plugins", "list")[1]
    """
    platform = """
    report, text = doctor()
    found = report["platform"]
    assert (found["name"], found["device_type"], found["owner"]) == ("acme", "cpu", ACME)
    assert found["why"] == "the tests say so" and found["facts"] == {"driver": "1.2.3"}
    assert {"extend_cli", "extra_passes"} <= set(found["overrides"])
    assert [each["name"] for each in found["candidates"]] == ["acme", "cpu"]
    assert "doctor.py" in found["first_asked_by"]
    owned = {(each["kind"], each["name"]) for each in report["overrides"]}
    assert owned == {("compiler pass", "acme.fold"), ("plugin option", "acme.depth")}
    assert report["states"] == {"acme": "active"} and report["problems"] == []
    assert "acme (acme-device 0.1.0)" in text and "driver 1.2.3" in text
    """
    nothing = """
    report, text = doctor()
    assert report["plugins"] == report["overrides"] == [] and "none is installed" in text
    assert report["platform"]["owner"] is None
    assert run("plugins", "list") == (0, "No plugin is installed.\\n")
    """
    fresh_cases(
        [
            case(shown, WELL),
            case(platform, distribution("acme-device", CLAIMING, acme=PLATFORM)),
            case(nothing, {}),
        ]
    )


OVERRIDING = """
def register():
    from opweave import ir

    @ir.ops.relu2.register_impl("shared", override=True)
    def _(x):
        return ir.ops.relu2.native(x)

    ir.ops.relu2.set_default(["shared"])
"""


def test_what_is_replaced(fresh_cases: FreshCases) -> None:
    code = """
    import warnings
    warnings.simplefilter("ignore")  # told there as well
    report, text = doctor()
    rows = {
        (each["kind"], each["name"], each["owner"]["plugin"]): each["replaced_by"]
        for each in report["overrides"]
    }
    second = {"plugin": "second", "distribution": "b-dist", "version": "0.1.0"}
    assert rows == {
        ("implementation", "relu2:shared", "first"): second,
        ("default of", "relu2", "first"): second,
        ("implementation", "relu2:shared", "second"): None,
        ("default of", "relu2", "second"): None,
    }
    assert "relu2:shared first (a-dist 0.1.0) replaced by second (b-dist 0.1.0)" in text
    """
    points = "[opweave.general_plugins]\n{0} = {0}:register\n"
    first = distribution("a-dist", points.format("first"), first=OVERRIDING)
    second = distribution("b-dist", points.format("second"), second=OVERRIDING)
    fresh_cases([case(code, {**first, **second})])


def test_what_is_broken(fresh_cases: FreshCases) -> None:
    broken = """
    report, text = doctor()
    assert report["states"] == {"acme": "loaded", "bad": "failed", "gone": "failed"}
    assert len(report["problems"]) == 3
    raised, missing, misspelled = sorted(report["problems"], key=lambda p: "general_plugin'" in p)
    assert "ZeroDivisionError" in raised and "OPWEAVE_PLUGINS=-bad" in raised
    assert "no_such_module" in missing and "gone-dist" in missing
    assert "opweave.general_plugin'" in misspelled and "opweave.general_plugins" in misspelled
    assert report["native"]["available"] and report["platform"]["name"] == "cpu"
    assert "bad-dist 0.1.0" in text and "problems" in text
    assert run("plugins", "list")[0] == 1
    """
    bad = distribution(
        "bad-dist", "[opweave.general_plugins]\nbad = bad:register\n", bad="def register(): 1 / 0"
    )
    gone = distribution("gone-dist", "[opweave.general_plugins]\ngone = no_such_module:register\n")
    typo = distribution("typo-dist", "[opweave.general_plugin]\ntypo = typo:register\n")
    lenient = """
    import os
    os.environ["OPWEAVE_PLUGINS_STRICT"] = "0"
    report, text = doctor()
    assert report["states"] == {"gone": "failed"} and len(report["problems"]) == 1
    """
    rivals = """
    report, text = doctor()
    assert report["platform"] is None and "none could be chosen" in text
    [problem] = report["problems"]
    assert "acme" in problem and "rival" in problem and "OPWEAVE_PLATFORM=acme" in problem
    code, text = run("plugins", "list", "--json")
    assert code == 1 and json.loads(text)["problems"] == [problem]
    """
    rival = distribution(
        "rival", "[opweave.platform_plugins]\nrival = rival:claim\n", rival=PLATFORM
    )
    contract = """
    report, text = doctor()
    assert report["platform"] is None
    [problem] = report["problems"]
    assert "AcmePlatform.doctr is not a member of the contract" in problem and "'doctor'" in problem
    """
    mute = """
    report, text = doctor()
    assert report["platform"]["name"] == "acme" and "facts" not in report["platform"]
    [problem] = report["problems"]
    assert "failed in doctor: OSError: the driver is gone" in problem
    """
    policy = """
    import os
    os.environ["OPWEAVE_PLUGINS"] = "-amce"
    report, text = doctor()
    [problem] = report["problems"]
    assert "Did you mean 'acme'" in problem and report["plugins"] == []
    """
    acme = distribution("acme-device", CLAIMING, acme=PLATFORM)
    fresh_cases(
        [
            case(broken, {**WELL, **bad, **gone, **typo}),
            case(lenient, gone),
            case(rivals, {**acme, **rival}),
            case(contract, _with(acme, "def doctor(self)", "def doctr(self)")),
            case(mute, _with(acme, 'return {"driver"', 'raise OSError("the driver is gone") #')),
            case(policy, WELL),
        ]
    )


def _with(files: dict[str, str], before: str, after: str) -> dict[str, str]:
    return {path: text.replace(before, after) for path, text in files.items()}
