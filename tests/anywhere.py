"""The Hopper backend offered on any device: for lowering, compiling and interpreting it without a GPU."""

from flashjax import backends
from flashjax.backends import hopper

ANYWHERE = backends.Backend(
    "hopper-anywhere", hopper.refusal, hopper.run_forward, hopper.run_backward, automatic=False
)


def offer() -> None:
    """Let calls name ``implementation="hopper-anywhere"``."""
    backends.BACKENDS = (*backends.BACKENDS, ANYWHERE)
