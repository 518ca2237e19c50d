"""What the command line shows: the answer on stdout, and progress on stderr where that is a terminal."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from atlas_jax.errors import RequestError

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

# A model's text must not move the cursor or retitle the window.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


def say(text: str, end: str = "") -> None:
    """Writes a piece of an answer to stdout at once; on a terminal, without control characters."""
    sys.stdout.write((text.translate(_CONTROLS) if sys.stdout.isatty() else text) + end)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark for whoever watches: on stderr, and only on a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def writable(option: str, path: str, folder: bool = False) -> None:
    """Checks that a file (or a folder of files) can be written there, before there is anything to write; makes the folder.

    Raises:
        RequestError: it cannot.
    """
    target = pathlib.Path(path)
    where = target if folder else target.parent
    try:
        where.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(where, os.W_OK | os.X_OK) else "no permission to write there"
        why = "is a folder; name a file" if not folder and (target.is_dir() or not target.name) else why
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise RequestError(f"{option} {path}: {why}")


def ask() -> str | None:
    """What the user says next; None at the end."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401  # gives `input` editing and history

    # The line editor restores the terminal on an exception, not on an exit.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input("> ").strip()
    except EOFError:
        return None
    finally:
        signal.signal(signal.SIGINT, handler)


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end the process with code 130, wherever it is.

    A KeyboardInterrupt may come up in a garbage collector's callback of JAX, which drops it, or inside the import of an
    extension module, which turns it into an ImportError. Nothing here needs unwinding: pieces of the answer are flushed
    as they come.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a shell's background job
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # the progress bars hide the cursor
    os._exit(130)


class Progress:
    """Bars on stderr while a model is loaded and compiled: call it with bytes (done, total), or with what is compiled.

    It vanishes when `clear` is called, as must happen before an answer is shown, and comes back with the next event.
    """

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._tasks: dict[str, Any] = {}
        self._compiling = 0

    def __call__(self, event: str | int, total: int | None = None) -> None:
        if not sys.stderr.isatty():
            return
        if isinstance(event, str):
            self._compiling += 1
            self._show("compiling", f"compiling {event[:60]} ({self._compiling})", None, None)
        else:
            self._show("loading", f"loading {(total or event) / 1e6:,.0f} MB", event, total)

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """How far something else is, or that it has begun."""
        if sys.stderr.isatty():
            self._show(name, name, done, total)

    def _show(self, kind: str, description: str, done: int | None, total: int | None) -> None:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress as Bars
            from rich.progress import TimeElapsedColumn

            bars = Bars(
                *Bars.get_default_columns()[:3],
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            bars.start()
            self._bars, self._tasks = bars, {}
        if kind not in self._tasks:
            self._tasks[kind] = self._bars.add_task(description, total=total)
        self._bars.update(self._tasks[kind], description=description, completed=done, total=total)

    def clear(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
