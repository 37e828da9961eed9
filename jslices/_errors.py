"""TensorFlow's error names, each also Python's own error of that kind."""


class InvalidArgumentError(ValueError):
    """An argument that no state could make right; whatever it was meant for is unchanged.

    Source: ``tf.errors.InvalidArgumentError``, which is no ``ValueError``.
    """


class CancelledError(RuntimeError):
    """What was waited for will not come: the object was closed.

    Source: ``tf.errors.CancelledError``.
    """


class DeadlineExceededError(TimeoutError):
    """What was waited for did not come within the timeout; nothing has changed.

    Source: ``tf.errors.DeadlineExceededError``.
    """


class UnavailableError(ConnectionError):
    """The process that holds the object is gone, or cannot be reached.

    Source: ``tf.errors.UnavailableError``.
    """


class FailedPreconditionError(RuntimeError):
    """What was asked for needs a state that is not there, such as an initialised variable.

    Source: ``tf.errors.FailedPreconditionError``.
    """


class OutOfRangeError(IndexError):
    """Something counted or read to its end; it is unchanged.

    Source: ``tf.errors.OutOfRangeError``.
    """


class NotFoundError(FileNotFoundError, KeyError):
    """Something that was asked for by name is not there: a file, or a variable in it.

    Source: ``tf.errors.NotFoundError``.
    """


class DataLossError(ValueError):
    """A file is damaged: what it holds is not what was written.

    Source: ``tf.errors.DataLossError``.
    """
