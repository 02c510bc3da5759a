"""The helpers that most packages written for vLLM import: a torch op of a function, a logger."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library, opcheck

from opweave import transaction
from opweave_vllm.vllm_api.logger import init_logger
from opweave_vllm.vllm_api.utils import direct_register_custom_op

X = torch.tensor([1.0, -2.0])


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


def add_into(x: Tensor, out: Tensor) -> None:
    out.add_(x)


def test_a_function_becomes_an_op() -> None:
    direct_register_custom_op("test_scaled", scaled, tags=(torch.Tag.pt2_compliant_tag,))
    op = torch.ops.vllm.test_scaled
    assert op(X, 3.0).equal(X * 3)
    assert torch.Tag.pt2_compliant_tag in op.default.tags
    opcheck(op.default, (X,))
    with pytest.raises(RuntimeError, match="test_scaled"):
        direct_register_custom_op("test_scaled", scaled)


def test_one_that_writes_into_an_argument() -> None:
    direct_register_custom_op(
        op_name="test_add_into", op_func=add_into, mutates_args=["out"], fake_impl=add_into
    )
    out = X.clone()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def twice(x: Tensor, out: Tensor) -> Tensor:
        torch.ops.vllm.test_add_into(x, out)
        return out * 2

    assert twice(X, out).equal(X * 4)
    assert out.equal(X * 2)


def test_a_fake_of_its_own() -> None:
    def counted(x: Tensor) -> Tensor:
        return torch.arange(int(x.sum().item()))

    def fake(x: Tensor) -> Tensor:
        return x.new_empty(7, dtype=torch.int64)

    direct_register_custom_op("test_counted", counted, fake_impl=fake)
    op: Any = torch.ops.vllm.test_counted
    assert op(torch.ones(3)).tolist() == [0, 1, 2]
    with torch._subclasses.FakeTensorMode() as mode:
        assert op(mode.from_tensor(X)).shape == (7,)


def test_a_library_and_a_key_of_the_callers() -> None:
    library: Any = Library("opweave_test_helpers", "FRAGMENT")  # type: ignore[no-untyped-call]
    direct_register_custom_op("scaled", scaled, target_lib=library, dispatch_key="CPU")
    op: Any = torch.ops.opweave_test_helpers.scaled
    assert op(X).equal(X * 2)
    with pytest.raises(NotImplementedError):
        op(X.to("meta"))


def test_a_plugin_that_fails_takes_it_back() -> None:
    for _ in range(2):
        with suppress(OSError), transaction.begin() as entered:
            direct_register_custom_op("test_taken_back", scaled)
            assert entered.registered == ["torch op vllm::test_taken_back"]
            assert torch.ops.vllm.test_taken_back(X).equal(X * 2)
            raise OSError("no bus")
        assert not hasattr(torch.ops.vllm, "test_taken_back")


def test_a_logger_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = init_logger("opweave_test_logger")
    assert logger is init_logger("opweave_test_logger") is logging.getLogger("opweave_test_logger")
    caplog.set_level(logging.DEBUG, logger.name)
    for _ in range(2):
        logger.info_once("found %s", "a bus")
        logger.info_once("found %s", "a card", scope="local")
        logger.debug_once("slow")
        logger.warning_once("slow")
        logger.info("again")
    assert caplog.messages == ["found a bus", "found a card", "slow", "slow", "again", "again"]
    assert {record.funcName for record in caplog.records} == {"test_a_logger_says_it_once"}
    assert [record.levelname for record in caplog.records[2:4]] == ["DEBUG", "WARNING"]
