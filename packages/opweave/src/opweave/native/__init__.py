"""opweave's native module, and the kit to build your own.

Importing this package loads and builds nothing. `module` loads opweave's native module. `load`
builds and loads your module just in time; `build` builds that of a package ahead of time, `setup`
packs it into a wheel, and `import_module` imports it.
"""

from opweave.native.calls import NativeModule, import_module, opened_modules
from opweave.native.jit import build, load, setup
from opweave.native.loader import NativeStatus, available, module, plain_check, status
from opweave.native.toolchain import NativeBuildError, NativeImportError, include_dir

__all__ = [
    "NativeBuildError", "NativeImportError", "NativeModule", "NativeStatus", "available", "build",
    "import_module", "include_dir", "load", "module", "opened_modules", "plain_check", "setup",
    "status",
]  # fmt: skip
