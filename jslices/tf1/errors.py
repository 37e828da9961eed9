"""TensorFlow's errors, as in ``tf.errors``; each is one of Python's own errors as well."""

from jslices import CancelledError as CancelledError
from jslices import DataLossError as DataLossError
from jslices import DeadlineExceededError as DeadlineExceededError
from jslices import FailedPreconditionError as FailedPreconditionError
from jslices import InvalidArgumentError as InvalidArgumentError
from jslices import NotFoundError as NotFoundError
from jslices import OutOfRangeError as OutOfRangeError
from jslices import UnavailableError as UnavailableError
