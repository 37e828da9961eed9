"""The processes that save or restore one checkpoint, and what they tell each other.

What is decided from the file system the first process decides: another one may see it a
moment earlier or later. Every process calls ``together``, ``agree`` and ``told`` equally
often, also if something fails in it, or the others would wait for ever.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jslices import InvalidArgumentError

_ROOM = 1024  # bytes of what a process tells the others


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process alone, or all processes, each of which does the same.

    Attributes:
      count: how many they are.
      own: the number of this one.
    """

    count: int = 1
    own: int = 0

    @property
    def is_first(self) -> bool:
        """True in the process that does what one alone can do."""
        return self.own == 0

    @contextlib.contextmanager
    def together(self, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
        """None goes on before all have come to the end, and none if one has failed.

        Args:
          undo: is called in all of them if one has failed; none raises before all have
            done that.

        Raises:
          OSError: where nothing failed, naming the process and what failed there.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        said = self.told("" if failure is None else f"{type(failure).__name__}: {failure}")
        if any(said):
            undo()
            self.told("")
        if failure is not None:
            raise failure
        for number, text in enumerate(said):
            if text:
                raise OSError(f"process {number} of {self.count} has failed: {text}")

    def agree(self, text: str, advice: str) -> None:
        """Refuses what another process does not say as the first does, in all of them."""
        first, *others = self.told(text)
        for number, other in enumerate(others, 1):
            if other != first:
                raise InvalidArgumentError(
                    f"process 0 has {first}, and process {number} has {other}; {advice}"
                )

    def told(self, text: str) -> list[str]:
        """What each process tells all of them; the end of a long text is left out.

        Raises:
          ConnectionError: if one of them has died.
        """
        if self.count == 1:
            return [text]
        encoded = text.encode(errors="backslashreplace")[:_ROOM].ljust(_ROOM, b"\0")
        data = np.frombuffer(encoded, np.uint8)
        try:
            gathered = multihost_utils.process_allgather(data)
        except Exception as error:
            raise ConnectionError(
                f"process {self.own} of {self.count} hears nothing from another one, which "
                f"may have died: {error}"
            ) from error
        return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in gathered]


#: This process alone.
ALONE: Processes = Processes()


def processes_of(tree: Any) -> Processes:
    """All processes if an array of the tree, or one it wants, is spread over several."""
    if any(is_spread(leaf) for leaf in jax.tree.leaves(tree)):
        return Processes(jax.process_count(), jax.process_index())
    return ALONE


def is_spread(value: Any) -> bool:
    """True for an array of which other processes hold parts or copies."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding is not None and not value.sharding.is_fully_addressable
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and not value.is_fully_addressable
