"""Settings of the process that a call sets for good and a `with` block for its time, also where blocks overlap.

Blocks of two threads need not be left in the order in which they were entered. So none writes back what it found: all
that is set is listed, and each takes out what it set itself.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import ClassVar

# One for all settings. A thread may take it twice: a finalizer that sets one may run at any allocation.
_lock = threading.RLock()

_PLAIN_CALLS_KEPT = 100


@dataclasses.dataclass(eq=False)
class Entry:
    """One value that is set: by `setting`, in a thread; None: the default.

    `is_block`: until its block is left. `within`: the block in which a plain call set it, and with which it goes.
    """

    value: object
    setting: Setting | None = None
    is_block: bool = False
    within: Entry | None = None
    thread: int = dataclasses.field(default_factory=threading.get_ident)


class Setting:
    """A setting whose objects set `value`: for good, or, as context managers, for a block. One for all threads.

    What is in force is the last of `_entries`. An object may be entered again, within its own block too. A plain call
    within a block is undone with it: it belongs to the last block of its thread, else to the last of all.

    Subclasses have a list `_entries` of their own, at first with the default alone, and `_apply`.
    """

    _entries: ClassVar[list[Entry]]

    def __init__(self, value: object) -> None:
        self._value = value
        self._prepare()
        with _lock:
            self._add(Entry(value, self, within=self._block_here()))
            self._forget_old_calls()

    @staticmethod
    def _apply(value: object) -> None:
        """Puts `value` into force; under the lock, so it runs no operators."""
        raise NotImplementedError

    @staticmethod
    def _prepare() -> None:
        """What is done before the value changes, without the lock."""

    def __enter__(self) -> None:
        self._prepare()
        with _lock:
            # The call that made this object set its value for good: no longer.
            self._remove([e for e in self._entries if e.setting is self and not e.is_block])
            self._add(Entry(self._value, self, is_block=True))

    def __exit__(self, *exception: object) -> None:
        try:
            self._prepare()
        finally:
            with _lock:
                own = self._own()
                if own is not None:
                    self._remove([e for e in self._entries if own in (e, e.within)])
                    self._apply(self._entries[-1].value)

    def _own(self) -> Entry | None:
        """This object's last entry: this thread's, as it may be entered in several, else any."""
        own = [e for e in self._entries if e.setting is self]
        here = [e for e in own if e.thread == threading.get_ident()]
        return (here or own or [None])[-1]

    def _block_here(self) -> Entry | None:
        blocks = [e for e in self._entries if e.is_block]
        here = [e for e in blocks if e.thread == threading.get_ident()]
        return (here or blocks or [None])[-1]

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._apply(entry.value)

    def _remove(self, gone: list[Entry]) -> None:
        self._entries[:] = [e for e in self._entries if e not in gone]

    def _forget_old_calls(self) -> None:
        """Only their own objects, entered and left, would bring back what earlier plain calls set."""
        calls = [e for e in self._entries[1:] if not e.is_block]
        self._remove(calls[:-_PLAIN_CALLS_KEPT])
