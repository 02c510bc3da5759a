"""Layers of another package in the place of ours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave.config import CompilationConfig, compilation_config
from opweave.layers import (
    CustomOp,
    DuplicateLayerError,
    LayerNameError,
    PluggableLayer,
    ReplacementError,
    op_registry_oot,
    replacement,
)

pytestmark = pytest.mark.usefixtures("registries")


class Scale(CustomOp):
    name = "scale"

    def __init__(self, by: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.by = by

    @classmethod
    def describe(cls) -> str:
        return cls.__name__

    def forward_native(self, x: Tensor) -> Tensor:
        return x * self.by


class MyScale(Scale):
    def __init__(self, by: float = 2.0, **options: Any) -> None:
        super().__init__(by, **options)
        self.mine = True

    def forward_oot(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward_oot(x)
        return result + 1


class Gate(PluggableLayer):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


class MyGate(Gate):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.mine = True


FORMS: dict[str, Callable[[Any], Any]] = {
    "bare": Scale.register_oot,
    "called": Scale.register_oot(),
    "class name, by position": CustomOp.register_oot("Scale"),
    "class name": CustomOp.register_oot(name="Scale"),
    "registered name, by position": CustomOp.register_oot("scale"),
    "all at once": lambda cls: CustomOp.register_oot(_decorated_op_cls=cls, name="Scale"),
    "all at once, registered name": lambda cls: CustomOp.register_oot(cls, "scale"),
    "on another class, by name": MyScale.register_oot(name="Scale"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_register_a_replacement(form: str) -> None:
    CustomOp.register("scale")(Scale)
    assert FORMS[form](MyScale) is MyScale
    assert list(op_registry_oot.values()) == [MyScale]
    built = Scale(3.0)
    assert type(built) is MyScale
    assert (built.by, built.mine) == (3.0, True)
    assert replacement(Scale).describe() == "MyScale"


def test_a_pluggable_layer_is_replaced_as_well() -> None:
    @Gate.register_oot
    class DummyGate(MyGate):
        pass

    gate = Gate(4)
    assert type(gate).__name__ == "DummyGate"
    assert gate.mine
    assert gate.weight.shape == (4,)


def test_exactly_the_class_is_replaced() -> None:
    class Sub(Scale):
        pass

    Scale.register_oot(MyScale)
    assert type(Sub()) is Sub
    assert type(MyScale()) is MyScale
    CustomOp.register("scale")(Scale)
    op_registry_oot["scale"] = op_registry_oot.pop("Scale")
    assert type(Scale()) is MyScale
    assert type(Sub()) is Sub  # it inherits the name, but is not what was registered


def test_a_replacement_may_have_the_same_class_name() -> None:
    original = Scale

    def other_module() -> type[Scale]:
        class Scale(original):  # type: ignore[misc, valid-type]
            pass

        return Scale

    ours = original.register_oot(other_module())
    assert type(original()) is ours
    assert type(ours()) is ours


def test_custom_ops_speaks_of_the_replacement_by_the_same_name() -> None:
    CustomOp.register("scale")(Scale)
    CustomOp.register_oot("Scale")(MyScale)
    assert MyScale.name == Scale.name == "scale"
    with compilation_config(CompilationConfig(custom_ops="-scale")) as config:
        assert not Scale.enabled()
        assert not MyScale.enabled()
        Scale()
    assert config.disabled_custom_ops == {"scale": 1}


@pytest.mark.parametrize("platform", ["dummy"], indirect=True)
def test_forward_oot_can_fall_back(platform: str) -> None:
    Scale.register_oot(MyScale)
    assert torch.equal(Scale(3.0)(torch.ones(2)), torch.full((2,), 4.0))


def test_one_replacement_only() -> None:
    class Other(Scale):
        pass

    Scale.register_oot(MyScale)
    with pytest.raises(DuplicateLayerError, match=r"MyScale replaces 'Scale'.*Other cannot"):
        Scale.register_oot(Other)
    CustomOp.register("scale")(Scale)
    CustomOp.register_oot("scale")(Other)
    with pytest.raises(DuplicateLayerError, match="two replacements"):
        Scale()


def test_twice_the_same_is_said_to_be_that() -> None:
    Scale.register_oot(MyScale)
    with pytest.raises(DuplicateLayerError, match="The same is registered twice"):
        Scale.register_oot(MyScale)


def test_another_class_of_that_name_is_not_replaced() -> None:
    CustomOp.register("scale")(Scale)
    Scale.register_oot(MyScale)
    other = type("Scale", (CustomOp,), {"forward_native": lambda self, x: x})
    assert type(other()) is other
    assert type(Scale()) is MyScale


def test_a_replacement_derives_from_what_it_replaces() -> None:
    class Stranger(CustomOp):
        pass

    with pytest.raises(ReplacementError, match=r"Stranger cannot replace .*Scale.*not a subclass"):
        Scale.register_oot(Stranger)
    CustomOp.register("scale")(Scale)
    for key in ("scale", "Scale"):
        with pytest.raises(ReplacementError, match=r"Derive it from [\w.]*\.Scale,"):
            CustomOp.register_oot(key)(Stranger)
    assert op_registry_oot == {}
    CustomOp.register_oot("Late")(Stranger)  # registered before what it is to replace

    class Late(CustomOp):
        pass

    with pytest.raises(ReplacementError, match=r"Stranger cannot replace .*Late"):
        Late()


@pytest.mark.parametrize("kind", [CustomOp, PluggableLayer])
def test_it_is_said_what_is_replaced(kind: Any) -> None:
    with pytest.raises(ReplacementError, match=r"does not say what .* @RMSNorm.register_oot"):
        kind.register_oot(MyScale if kind is CustomOp else MyGate)
    with pytest.raises(ReplacementError, match="does not say what"):
        kind.register_oot()
    with pytest.raises(LayerNameError, match="'a b'"):
        kind.register_oot("a b")(MyScale)


def test_what_was_built_before_stays_what_it_is() -> None:
    early = Scale(5.0)
    Scale.register_oot(MyScale)
    for copied in (copy.deepcopy(early), copy.copy(early), pickle.loads(pickle.dumps(early))):
        assert type(copied) is Scale
        assert torch.equal(copied(torch.ones(1)), torch.full((1,), 5.0))
