"""A class derived from ``Platform`` is checked when it is defined."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import pytest
import torch

from opweave.ir.errors import OpweaveError
from opweave.platforms import (
    Capabilities,
    CpuPlatform,
    CudaPlatform,
    Platform,
    RocmPlatform,
    TpuPlatform,
    XpuPlatform,
)
from opweave.platforms import base as contract
from opweave.platforms.base import (
    PlatformApiError,
    PlatformContractError,
    UnsupportedByPlatformError,
)
from support import ROOT

BUILTIN = (CpuPlatform, CudaPlatform, RocmPlatform, TpuPlatform, XpuPlatform)


def define(base: type = Platform, **members: Any) -> type:
    return type("Acme", (base,), members)


def faults(**members: Any) -> str:
    with pytest.raises(PlatformContractError) as raised:
        define(**members)
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, OpweaveError)
    return str(raised.value)


def test_the_whole_contract_can_be_implemented() -> None:
    members: dict[str, Any] = dict.fromkeys(contract.members(Platform))
    for name, value in vars(Platform).items():
        if name in members:
            members[name] = value
    members |= {"name": "acme", "device_type": "cpu", "_helper": 1}
    assert define(**members)().name == "acme"


def test_a_hook_may_take_more_than_it_is_given() -> None:
    define(
        get_device_name=classmethod(lambda cls, index=0, verbose=False: "Acme"),
        seed_all=staticmethod(lambda seed: None),
        memory_info=lambda self, *args, **kwargs: (1, 2),
        capabilities=cached_property(lambda self: Capabilities(fp8=True)),
        supported_dtypes=property(lambda self: (torch.float32,)),
        get_worker_cls=lambda self, config: "acme.Worker",
    )


@pytest.mark.parametrize(
    ("member", "value", "named"),
    [
        (
            "get_piecewise_backend_cls",
            lambda self: "",
            ("not a member of the contract", "must start with _"),
        ),
        ("get_worker_class", lambda self, config: "", ("Did you mean 'get_worker_cls'",)),
        ("is_async_output_supported", True, ("not a member of the contract",)),
        ("get_worker_cls", lambda self: "", ("does not take 'config'", "(self, config)")),
        ("get_worker_cls", lambda self, config, rank: "", ("requires 'rank', which is never",)),
        ("set_device", lambda self, i: None, ("does not take 'index'", "requires 'i'")),
        ("memory_info", lambda self, *, index=0: (0, 0), ("does not take 'index'",)),
        ("get_device_name", lambda self, index: "", ("requires 'index', which is optional",)),
        ("seed_all", lambda self, other=1, seed=0: None, ("'seed' in another position",)),
        ("synchronize", lambda: None, ("takes no self",)),
        ("synchronize", 1, ("is 1", "should be a method (self)")),
        ("synchronize", property(lambda self: None), ("is a property", "should be a method")),
        ("synchronize", int, ("should be a method",)),
        ("name", "an npu", ("'an npu'", "an identifier")),
        ("name", lambda self: "acme", ("is a method", "an identifier")),
        ("device_type", None, ("torch's name",)),
        ("dispatch_tags", "oot", ("'oot'", "a tuple of strings")),
        ("dispatch_tags", (), ("a tuple of strings",)),
        ("supported_dtypes", (torch.float32, "bfloat16"), ("a tuple of torch.dtype",)),
        ("capabilities", {"fp8": True}, ("a Capabilities(...)",)),
        ("dist_backend", 3, ("torch.distributed",)),
    ],
)
def test_what_breaks_the_contract(member: str, value: Any, named: tuple[str, ...]) -> None:
    message = faults(**{member: value})
    assert f"Acme.{member}" in message
    for part in named:
        assert part in message


def test_every_fault_is_named_at_once() -> None:
    async def synchronize(self: Any) -> None: ...

    assert "coroutine" in faults(synchronize=synchronize)
    message = faults(device_typ="acme", name=1, memory_info=lambda self: (0, 0))
    assert len(re.findall(r"^  \S+Acme\.", message, re.MULTILINE)) == 3


def test_what_is_mixed_in_counts_too() -> None:
    class Helper:
        def helper(self) -> None: ...

    with pytest.raises(
        PlatformContractError, match=r"Helper\.helper is not a member of the contract"
    ):
        type("Acme", (Helper, Platform), {})


def test_a_broken_parent_is_not_reported_again() -> None:
    parent = define(name="acme", device_type="cpu")
    assert define(parent, name="other").__mro__[1] is parent


@pytest.mark.parametrize(
    ("api", "named"), [(0, ("older", "install a version")), (2, ("newer", "upgrade opweave"))]
)
def test_other_versions_of_the_contract(api: int, named: tuple[str, ...]) -> None:
    with pytest.raises(PlatformApiError) as raised:
        define(api=api)
    for part in (*named, f"version {api}", "version 1"):
        assert part in str(raised.value)


@pytest.mark.parametrize("api", ["1", None, True, 1.0])
def test_a_version_is_a_number(api: Any) -> None:
    with pytest.raises(PlatformApiError, match="should be the number 1"):
        define(api=api)


def test_an_object_needs_a_name_and_a_device_type_and_is_asked_nothing() -> None:
    with pytest.raises(PlatformContractError) as raised:
        contract.check_object(define()(), Platform, "acme.Acme")
    assert "Acme.name is missing" in str(raised.value)
    assert "Acme.device_type is missing" in str(raised.value)
    with pytest.raises(PlatformContractError, match=r"acme\.Acme is a str"):
        contract.check_object("acme", Platform, "acme.Acme")

    def started(self: Any) -> Capabilities:
        raise AssertionError("the runtime was started")

    acme = define(name="acme", device_type="cpu", capabilities=cached_property(started))
    contract.check_object(acme(), Platform, "acme.Acme")


def test_capabilities_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Capabilities().fp8 = True  # type: ignore[misc]


def test_memory_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(UnsupportedByPlatformError, match=r"define .*memory_info"):
        define(name="acme", device_type="mps")().memory_info()


@pytest.mark.parametrize("platform", BUILTIN)
def test_built_in_platforms_keep_the_contract(platform: type[Platform]) -> None:
    contract.check_object(platform(), Platform, platform.__name__)


def test_the_page_shows_the_whole_contract() -> None:
    shown = (ROOT / "docs" / "how-to" / "platforms.md").read_text(encoding="utf-8")
    assert not any(vars(Capabilities()).values()), "absent unless named"
    for name in (*contract.members(Platform), *vars(Capabilities())):
        assert re.search(rf"^\| `{name}[(`].*\| \w[^|]+ \|$", shown, re.MULTILINE), name
