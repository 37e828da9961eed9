"""TensorFlow's error names, each also Python's own error of that kind."""

from jslices._names import public as _public


class InvalidArgumentError(ValueError):
    """An argument that is wrong in any state; nothing has changed.

    Source: ``tf.errors.InvalidArgumentError``, which is no ``ValueError``.
    """


class CancelledError(RuntimeError):
    """The wait is over: the object was closed.

    Source: ``tf.errors.CancelledError``.
    """


class DeadlineExceededError(TimeoutError):
    """The timeout has passed; nothing has changed.

    Source: ``tf.errors.DeadlineExceededError``.
    """


class UnavailableError(ConnectionError):
    """The process that holds the object is gone, or cannot be reached.

    Source: ``tf.errors.UnavailableError``.
    """


class FailedPreconditionError(RuntimeError):
    """The operation needs another state first, such as an initialised variable.

    Source: ``tf.errors.FailedPreconditionError``.
    """


class OutOfRangeError(IndexError):
    """Something counted or read to its end; it is unchanged.

    Source: ``tf.errors.OutOfRangeError``.
    """


class NotFoundError(FileNotFoundError, KeyError):
    """Something of this name does not exist: a file, or a variable in it.

    Source: ``tf.errors.NotFoundError``.
    """


class DataLossError(ValueError):
    """A file is damaged: its contents are not what was written.

    Source: ``tf.errors.DataLossError``.
    """


__all__, __dir__ = _public(__name__)
