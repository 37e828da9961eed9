"""TensorFlow's errors, as in ``tf.errors``; each is one of Python's own errors as well."""

from jslices._errors import CancelledError as CancelledError
from jslices._errors import DataLossError as DataLossError
from jslices._errors import DeadlineExceededError as DeadlineExceededError
from jslices._errors import FailedPreconditionError as FailedPreconditionError
from jslices._errors import InvalidArgumentError as InvalidArgumentError
from jslices._errors import NotFoundError as NotFoundError
from jslices._errors import OutOfRangeError as OutOfRangeError
from jslices._errors import UnavailableError as UnavailableError
