"""TensorFlow's errors, as in ``tf.errors``; each is one of Python's own errors as well."""

from jslices import InvalidArgumentError as InvalidArgumentError
from jslices.errors import CancelledError as CancelledError
from jslices.errors import DataLossError as DataLossError
from jslices.errors import DeadlineExceededError as DeadlineExceededError
from jslices.errors import FailedPreconditionError as FailedPreconditionError
from jslices.errors import NotFoundError as NotFoundError
from jslices.errors import OutOfRangeError as OutOfRangeError
from jslices.errors import UnavailableError as UnavailableError

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
