"""The certificate of the server."""

from __future__ import annotations

import ssl

from opweave_engine.server.config import ServerConfig
from opweave_engine.server.errors import ServerConfigError


def check_certificate(config: ServerConfig) -> None:
    """Check that the certificate can be used, before the model is loaded.

    Raises:
        ServerConfigError: a file is missing or damaged, or the key does not fit.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, an encrypted key would be asked for on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except OSError as error:  # of which ssl.SSLError is one
        files = config.ssl_certfile
        if config.ssl_keyfile is not None:
            files += f" and {config.ssl_keyfile}"
        raise ServerConfigError(
            f"Cannot use the certificate in {files}: {error.strerror or error}. Give PEM files: a "
            "certificate, and its key without a password."
        ) from error
