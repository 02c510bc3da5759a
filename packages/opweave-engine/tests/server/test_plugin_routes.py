"""HTTP routes of plugins: they are attached, owned, and never in each other's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

from opweave import transaction
from opweave.config.values import DuplicateNameError, OpenRegistry
from opweave.registration import Owner, owned_by
from opweave_engine import EngineClient
from opweave_engine.server import PluginRouteError, ServerConfig, app, create_app
from opweave_engine.server.app import add_router
from server.conftest import Start
from server.fake_engine import FakeEngine

ACME = Owner("acme", "acme-device", "0.1.0")
OTHER = Owner("other", "other-device", "2.0")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh: OpenRegistry[Any] = OpenRegistry("HTTP router")
    monkeypatch.setattr(app, "routers", fresh)
    monkeypatch.setattr("opweave_engine.server.app.routers", fresh)


def router_with(path: str, *methods: str) -> Callable[[EngineClient], APIRouter]:
    def make(engine: EngineClient) -> APIRouter:
        router = APIRouter()

        def answer() -> dict[str, Any]:
            return {"waiting": engine.stats().waiting, "model": engine.model_name}

        router.add_api_route(path, answer, methods=list(methods or ("GET",)))
        return router

    return make


def by_name(engine: EngineClient) -> APIRouter:
    return router_with("/acme/named")(engine)


def test_a_route_is_served_like_the_others(start: Start) -> None:
    with owned_by(ACME):
        add_router("queue", router_with("/acme/queue"))
        add_router("named", f"{__name__}:by_name")
    server = start(config=ServerConfig(api_keys=("k",)))
    for path in ("/acme/queue", "/acme/named"):
        assert server.get(path).status_code == 401
        answer = server.get(path, headers={"Authorization": "Bearer k"})
        assert answer.json() == {"waiting": 0, "model": "tiny-pydoc"}
        assert answer.headers["x-request-id"]
    schema = server.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    assert "/acme/queue" in schema["paths"]


def test_another_method_of_a_path_is_free(start: Start) -> None:
    with owned_by(ACME):
        add_router("completions", router_with("/v1/completions", "GET"))
    server = start()
    assert server.get("/v1/completions").status_code == 200
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def create() -> FastAPI:
    return create_app(FakeEngine())


def test_a_route_of_opweave_cannot_be_taken() -> None:
    with owned_by(ACME):
        add_router("mine", router_with("/v1/completions", "POST"))
    with pytest.raises(PluginRouteError) as error:
        create()
    assert "'mine' of plugin acme (acme-device 0.1.0) has POST /v1/completions" in str(error.value)
    assert "route of opweave" in str(error.value)
    assert "OPWEAVE_PLUGINS=-name" in str(error.value)


def test_a_route_of_another_plugin_cannot_be_taken() -> None:
    with owned_by(ACME):
        add_router("one", router_with("/queue", "GET", "PUT"))
    with owned_by(OTHER):
        add_router("two", router_with("/queue", "PUT"))
    with pytest.raises(PluginRouteError, match=r"'two' of plugin other .* PUT /queue.*acme"):
        create()


def test_names_are_taken_once_and_given_back_when_a_plugin_fails() -> None:
    with owned_by(ACME):
        add_router("one", router_with("/a"))
    with (
        owned_by(OTHER),
        pytest.raises(DuplicateNameError, match="already registered by plugin acme"),
    ):
        add_router("one", router_with("/b"))
    with pytest.raises(RuntimeError):
        _fail_after_adding("two")
    assert list(app.routers) == ["one"]


def _fail_after_adding(name: str) -> None:
    with transaction.begin():
        add_router(name, router_with("/b"))
        raise RuntimeError


def broken(engine: EngineClient) -> APIRouter:
    raise RuntimeError("no such device")


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        (broken, "RuntimeError: no such device"),
        (lambda engine: "router", "must be a fastapi.APIRouter"),
        ("no.such.module:router", "no.such.module"),
        (f"{__name__}:nothing", "nothing"),
    ],
)
def test_routers_that_cannot_be_made(factory: Any, named: str) -> None:
    with owned_by(ACME):
        add_router("queue", factory)
    with pytest.raises(PluginRouteError, match=named) as error:
        create()
    assert "plugin acme (acme-device 0.1.0)" in str(error.value)
