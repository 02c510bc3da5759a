"""acme: a device for opweave that lies outside opweave.

Importing this package loads nothing; :func:`init` gives torch the device.

>>> import acme_device, torch
>>> acme_device.init()
>>> torch.ones(2, device="acme").device
device(type='acme', index=0)
"""

from acme_device.driver import AcmeError, fallbacks, init, reset_fallbacks

__all__ = ["AcmeError", "fallbacks", "init", "reset_fallbacks"]
