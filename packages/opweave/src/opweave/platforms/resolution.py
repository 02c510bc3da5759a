"""Resolution of the platform of this process, once, on first use, and its form for children.

:mod:`opweave.plugins.loader` collects the claims of platform plugins, and chooses between them.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

from opweave import plugins
from opweave.config import EngineConfig
from opweave.config.patches import ConfigPatch, PatchError, apply_patches
from opweave.config.plugin_options import PluginOptions, given_plugin_options, set_plugin_options
from opweave.config.values import OpenRegistry
from opweave.ir.errors import OpweaveError
from opweave.packages import installed_version
from opweave.platforms import base
from opweave.platforms.builtin import BUILTIN
from opweave.plugins.entry import PlatformReentryError, ReferenceNameError, split_qualname
from opweave.plugins.loader import choose as best_candidate
from opweave.plugins.loader import loader, refuse_reentry
from opweave.registration import Owner, bound

# The platform of a process in a form that its child processes read, so that they use the same.


VARIABLE = "OPWEAVE_PLATFORM_RESOLUTION"
_IN_USE = (plugins.State.LOADED, plugins.State.ACTIVE)


@dataclass(frozen=True)
class Handover:
    """A platform and its environment.

    Attributes:
        name: the plugin's name, as in ``OPWEAVE_PLATFORM``.
        claim: the claim of the platform.
        owner: the plugin that provides it, or None if it comes with opweave.
        versions: versions of opweave, torch and every distribution whose plugins are in use.
        options: the values of ``--plugin.<plugin>.<key>`` options.
    """

    name: str
    claim: plugins.Claim
    owner: Owner | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, claim: plugins.Claim, owner: Owner | None) -> Self:
        """Return the handover of this process."""
        used = {r.distribution for r in plugins.plugin_report() if r.state in _IN_USE}
        if owner is not None:
            used.add(owner.distribution)
        versions = {name: installed_version(name) for name in ("opweave", "torch", *sorted(used))}
        return cls(name, claim, owner, versions, given_plugin_options())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of :meth:`to_json`.

        Raises:
            PlatformMismatchError: *text* is malformed.
        """
        try:
            data = json.loads(text)
            claim, owner = plugins.Claim(**data.pop("claim")), data.pop("owner")
            return cls(claim=claim, owner=None if owner is None else Owner(**owner), **data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise base.PlatformMismatchError(
                f"{VARIABLE} must be the result of Resolution.to_json() in the parent process; "
                f"found {text!r}."
            ) from error

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def check_versions(self) -> None:
        """Raise :class:`PlatformMismatchError` if a version differs in this process."""
        for name, expected in self.versions.items():
            version = installed_version(name)
            if version != expected:
                installed = f"no {name}" if version is None else f"{name} {version}"
                raise base.PlatformMismatchError(
                    f"the parent process runs on {self.claim.platform} with {name} {expected}; "
                    f"this process finds {installed}. Both must use one environment."
                )


# Selection and construction of the platform of a process.


@dataclass(frozen=True)
class Resolution:
    """The platform of this process, and why it was chosen.

    Attributes:
        platform: the platform.
        chosen: its name, the claim of its plugin or of opweave, and the plugin.
        candidates: all platforms that claim the machine, including the chosen one.
        why: the reason for the choice.
        trace: the stack of the first access, formatted as in a traceback.
    """

    platform: base.Platform
    chosen: plugins.PlatformCandidate
    candidates: tuple[plugins.PlatformCandidate, ...]
    why: str
    trace: str = ""

    @property
    def qualname(self) -> str:
        """The qualified name of the platform's class."""
        return self.chosen.claim.platform

    @property
    def owner(self) -> Owner | None:
        """The plugin that provides the platform, or None if it comes with opweave."""
        return self.chosen.owner

    def to_json(self) -> str:
        """Return the resolution as JSON for a child process.

        Pass it to :func:`impose` there, or set it as ``OPWEAVE_PLATFORM_RESOLUTION``.
        """
        return Handover.of(*self.chosen).to_json()


def choose() -> Resolution:
    """Choose the platform of this process: that of its parent, or the claim with the best score.

    Raises:
        PluginError, PlatformError: see :func:`resolution`.
    """
    text = os.environ.get(VARIABLE)
    if text:
        return imposed(Handover.from_json(text))
    return _first_usable(plugins.choose_platform(BUILTIN))


def imposed(parent: Handover) -> Resolution:
    """Return the platform of the parent process.

    Raises:
        PlatformMismatchError: a package has another version than in the parent.
        PluginError, PlatformError: the class cannot be used here.
    """
    parent.check_versions()
    base.check_api(parent.claim.api, parent.claim.platform, plugins.PLATFORM_API)
    set_plugin_options(parent.options)
    chosen = plugins.PlatformCandidate(parent.name, parent.claim, parent.owner)
    platform = _made(chosen)
    return Resolution(platform, chosen, (chosen,), "the parent process runs on it")


def _first_usable(choice: plugins.Choice) -> Resolution:
    """Return the chosen platform, or the next best if it is broken and plugins are not strict."""
    chosen = choice.chosen
    try:
        return Resolution(_made(chosen), chosen, choice.candidates, _why(choice))
    except OpweaveError as error:
        others = tuple(other for other in choice.candidates if other is not chosen)
        if chosen.owner is None or choice.selected or not others or loader().policy.strict:
            raise
        warnings.warn(str(error), plugins.PluginWarning, stacklevel=2)
    return _first_usable(plugins.Choice(best_candidate(others), others, None))


def _why(choice: plugins.Choice) -> str:
    if choice.selected is not None:
        return f"OPWEAVE_PLATFORM={choice.selected}"
    return choice.chosen.claim.why or "its plugin claims this machine"


def _made(chosen: plugins.PlatformCandidate) -> base.Platform:
    _, claim, owner = chosen
    with _way_out(owner), plugins.hook(owner, "__init__"):
        platform = _object(claim.platform, owner)
    with plugins.hook(owner, "extend_cli"):
        platform.extend_cli(PluginOptions(platform.name))
    return platform


@contextmanager
def _way_out(owner: Owner | None) -> Iterator[None]:
    """Add to errors about a plugin's class how to disable the plugin."""
    try:
        yield
    except (base.PlatformContractError, ReferenceNameError) as error:
        if owner is None:
            raise
        setting = loader().policy.leaving_out(owner.plugin)
        message = f"{error}\nTo go on without plugin {owner}: {setting}"
        raise type(error)(message) from error


def _object(qualname: str, owner: Owner | None) -> base.Platform:
    cls = plugins.resolve_obj_by_qualname(qualname)
    if not (isinstance(cls, type) and issubclass(cls, base.Platform)):
        raise base.PlatformContractError(
            f"{qualname} is {cls!r}; it should be a class derived from Platform."
        )
    platform = cls()
    base.check_object(platform, base.Platform, qualname)
    if owner is not None and platform.name in plugins.BUILTIN_PLATFORMS:
        raise base.PlatformContractError(
            f"{qualname}.name is {platform.name!r}, which is a platform of opweave. Choose another."
        )
    return platform


# Resolution of the platform of this process, once, on first use.


_PACKAGE = os.path.dirname(__file__)


def resolution() -> Resolution:
    """Return the resolution of this process; the first call resolves the platform.

    Raises:
        PluginError: a platform plugin failed, or several claim the device.
        PlatformContractError: the chosen class is not a platform, or violates the contract.
        PlatformMismatchError: the parent process has another platform or other versions.
    """
    return _found if _found is not None else _once(choose)


def resolve_current_platform_cls_qualname() -> str:
    """Return the qualified name of the current platform's class; see :func:`resolution`."""
    return resolution().qualname


def is_resolved() -> bool:
    """Whether the platform of this process is resolved; does not resolve it."""
    return _found is not None


def impose(text: str) -> Resolution:
    """Use the platform of the parent process; *text* is the result of its ``to_json``.

    Args:
        text: the result of ``to_json`` in the parent process.

    Raises:
        PlatformMismatchError: this process has resolved another platform, or has other versions.
        PlatformContractError, PluginError: as :func:`resolution`.
    """
    parent = Handover.from_json(text)
    found = _once(partial(imposed, parent))
    if found.qualname != parent.claim.platform or found.owner != parent.owner:
        raise base.PlatformMismatchError(
            f"the parent process runs on {parent.claim.platform}, but this process has resolved "
            f"{found.qualname} ({found.why}), here:\n{found.trace}"
        )
    return found


_resolving: ContextVar[bool] = ContextVar("resolving_platform", default=False)
_lock = threading.RLock()
_found: Resolution | None = None


def _once(find: Callable[[], Resolution]) -> Resolution:
    global _found
    if _resolving.get():
        refuse_reentry()
        raise PlatformReentryError(
            "current_platform is used by the code that resolves it. The function of a platform "
            "plugin and the constructor of a platform must not use it, nor import a module that "
            "does."
        )
    with _lock:
        if _found is None:
            trace = _trace()
            with bound(_resolving, True):
                _found = replace(find(), trace=trace)
        return _found


@contextmanager
def isolated_resolution() -> Iterator[None]:
    """Resolve the platform again inside the block; for tests."""
    global _found
    before, _found = _found, None
    try:
        yield
    finally:
        _found = before


def _trace() -> str:
    frames = traceback.extract_stack()
    while frames and os.path.dirname(frames[-1].filename) == _PACKAGE:
        frames.pop()
    return "".join(traceback.format_list(frames))


# Compiler passes of plugins, by qualified name; they are imported at the first compilation.


registered_passes: OpenRegistry[str] = OpenRegistry("compiler pass")
"""The passes registered with :func:`register_pass`."""


class PassReference(NamedTuple):
    """The qualified name of a pass, and the plugin that registered it."""

    qualname: str
    owner: Owner | None


def register_pass(qualname: str) -> None:
    """Add a compiler pass for all platforms; :meth:`Platform.extra_passes` adds passes for one.

    Args:
        qualname: the qualified name of the function, such as ``"acme.passes.fold_scales"``; see
            :mod:`opweave.compile.plan`.

    Raises:
        DuplicateNameError: (a ValueError) it is already registered.
        ReferenceNameError: (an ImportError) it is not a qualified name.
    """
    split_qualname(qualname)
    registered_passes.add(qualname, qualname)


def pass_references(platform: base.Platform) -> list[PassReference]:
    """Return the passes in the order in which they run: registered ones, then the platform's."""
    owners = {name: entry.owner for name, entry in registered_passes.entries.items()}
    for name in platform.extra_passes(None):
        owners.setdefault(name, resolution().owner)
    return [PassReference(name, owner) for name, owner in owners.items()]


# Adapts a configuration to the platform, and records each change with its reason.


_OPS, _BACKEND = "compilation_config.custom_ops", "compilation_config.backend"


def configured(config: EngineConfig, platform: base.Platform | None = None) -> EngineConfig:
    """Return *config* with the platform's patches; user settings stay unless a patch has force.

    Applies the platform's defaults for values, the compile backend and ``CustomOp`` ops, then the
    changes of its ``check_and_update_config``. Idempotent. The source of each value is its
    :meth:`~opweave.config.values.Config.origin`.

    Args:
        config: the configuration.
        platform: by default the current one.

    Raises:
        PatchError: the platform returned an invalid patch.
        UnsupportedByPlatformError: it does not support ``config.dtype``.
        SettingError: it returned a malformed value.
        OpweaveError: it cannot run *config*.
    """
    platform = platform or resolution().platform
    source = f"platform {platform.name}"
    _check_dtype(config, platform)
    for stage in (_defaults, _backend, _custom_ops, _checked):
        config = apply_patches(config, stage(config, platform), source)
    return config


def _check_dtype(config: EngineConfig, platform: base.Platform) -> None:
    supported = [str(dtype).removeprefix("torch.") for dtype in platform.supported_dtypes]
    if config.dtype not in ("auto", *supported):
        raise base.UnsupportedByPlatformError(
            f"dtype={config.dtype!r} is not supported by platform {platform.name!r}; choose one of "
            f"{', '.join(supported)}."
        )


def _defaults(config: EngineConfig, platform: base.Platform) -> Sequence[ConfigPatch]:
    with plugins.hook(_owner(platform), "config_defaults"):
        patches = list(platform.config_defaults(config))
    for patch in patches:
        if isinstance(patch, ConfigPatch) and patch.force:
            raise PatchError(
                f"platform {platform.name}: config_defaults forces {patch.path}. Defaults must not "
                "override the user; return the patch from check_and_update_config."
            )
    return patches


def _custom_ops(config: EngineConfig, platform: base.Platform) -> Sequence[ConfigPatch]:
    with plugins.hook(_owner(platform), "default_custom_ops"):
        custom_ops = list(platform.default_custom_ops(config))
    if not custom_ops or config.compilation.origin("custom_ops").by_user:
        return ()
    typed = config.compilation.updated({"custom_ops": custom_ops}, f"platform {platform.name}")
    return [ConfigPatch(_OPS, typed.custom_ops, "the platform's ops")]


def _backend(config: EngineConfig, platform: base.Platform) -> Sequence[ConfigPatch]:
    with plugins.hook(_owner(platform), "get_compile_backend"):
        backend = platform.get_compile_backend(config)
    if config.compilation.origin("backend").by_user:
        return ()
    return [ConfigPatch(_BACKEND, backend, "the platform's compiler")]


def _checked(config: EngineConfig, platform: base.Platform) -> Sequence[ConfigPatch]:
    with plugins.hook(_owner(platform), "check_and_update_config"):
        return list(platform.check_and_update_config(config))


def _owner(platform: base.Platform) -> Owner | None:
    found = resolution()
    return found.owner if found.platform is platform else None
