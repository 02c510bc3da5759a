"""Provider ``acme``: implementations of ops that run on the device. Importing it registers them."""

from acme_device.kernels import attention, linear, norm, pointwise, rotary

__all__ = ["attention", "linear", "norm", "pointwise", "rotary"]
