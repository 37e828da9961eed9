"""Agreement of the processes that save or restore one checkpoint.

Only the first process decides from the state of the file system, which others may see a
moment earlier or later. Every process calls ``barrier``, ``check_agreement`` and
``allgather_text`` equally often, even if it fails, or the others would wait for ever.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from jslices import InvalidArgumentError
from jslices._typing import PyTree

_TEXT_BYTES = 1024  # of a text that processes exchange


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process alone, or all processes, which all do the same."""

    count: int = 1
    index: int = 0  #: the number of this one.

    @property
    def is_first(self) -> bool:
        """True in the process that does the work of a single one."""
        return self.index == 0

    @contextlib.contextmanager
    def barrier(self, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Let no process go on before all have left this block, or any if one has failed.

        Then all call ``undo``, and none raises before all have. In a process that has not
        failed, OSError names the process that has, and what failed there.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        own = "" if failure is None else f"{type(failure).__name__}: {failure}"
        failures = self.allgather_text(own)
        if any(failures):
            undo()
            self.allgather_text("")
        if failure is not None:
            raise failure
        for number, text in enumerate(failures):
            if text:
                raise OSError(f"process {number} of {self.count} has failed: {text}")

    def check_agreement(self, text: str, advice: str) -> None:
        """Refuses, in all processes, a text that differs from that of the first."""
        first, *others = self.allgather_text(text)
        for number, other in enumerate(others, 1):
            if other != first:
                raise InvalidArgumentError(
                    f"process 0 has {first}, and process {number} has {other}; {advice}"
                )

    def allgather_text(self, text: str) -> list[str]:
        """The texts of all processes, cut off after 1024 bytes."""
        if self.count == 1:
            return [text]
        encoded = text.encode(errors="backslashreplace")[:_TEXT_BYTES]
        data = np.frombuffer(encoded.ljust(_TEXT_BYTES, b"\0"), np.uint8)
        try:
            gathered = multihost_utils.process_allgather(data)
        except Exception as error:
            raise ConnectionError(
                f"process {self.index} of {self.count} hears nothing from another one, "
                f"which may have died: {error}"
            ) from error
        return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in gathered]


ALONE: Processes = Processes()


def processes_of(tree: PyTree) -> Processes:
    """All processes if an array or struct of the tree is spread over several."""
    if any(is_spread(leaf) for leaf in jax.tree.leaves(tree)):
        return Processes(jax.process_count(), jax.process_index())
    return ALONE


def is_spread(value: object) -> bool:
    """True for an array that other processes hold in part or as copies."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding is not None and not value.sharding.is_fully_addressable
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return not value.is_fully_addressable
    return False
