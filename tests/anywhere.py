"""The Hopper backend offered on any device: for lowering, compiling and interpreting it without a GPU."""

from flashjax import backends
from flashjax.backends import hopper, xla

ANYWHERE = backends.Backend(
    "hopper-anywhere", hopper.refusal, hopper.run_forward, hopper.run_backward, automatic=False
)


BACKWARD = backends.Backend(
    "hopper-backward", hopper.refusal, xla.forward, hopper.run_backward, automatic=False
)


def offer() -> None:
    """Let calls name ``implementation="hopper-anywhere"``, and "hopper-backward" for that pass alone."""
    backends.BACKENDS = (*backends.BACKENDS, ANYWHERE, BACKWARD)
