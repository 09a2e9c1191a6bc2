"""How far a long job has come: a line that is drawn over on a terminal, a line now and then elsewhere."""
import shutil
import sys
import time

_BETWEEN_SECONDS = {True: 0.1, False: 10.0}         # on a terminal; in a file


class Progress:
    """Called as progress(done, total, what), in bytes; closed at the end."""

    def __init__(self, title, stream=None):
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._last = self._start if not self._terminal else 0.0
        self._width = 0

    def __call__(self, done, total, what):
        now = time.monotonic()
        if now - self._last >= _BETWEEN_SECONDS[self._terminal]:
            self._last = now
            self._show(self._line(done, total, what, now - self._start))

    def close(self):
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _line(self, done, total, what, seconds):
        share = done / total if total else 1.0
        speed = done / seconds if seconds > 0 else 0
        left = (total - done) / speed if speed else 0
        amounts = f"{amount(done)} of {amount(total)}, {amount(speed)}/s"
        return f"{self._title} {100 * share:3.0f} %  {amounts}{f', {left:.0f} s left' if left >= 1 else ''}  {what}"

    def _show(self, line):
        if not self._terminal:
            self._stream.write(line + "\n")
        else:
            line = line[:shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        self._stream.flush()


def amount(value, unit="B"):
    """1.5 GB, 320 kB, 12 B."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}{unit}".rstrip()
    return f"{value:.0f} {unit}".rstrip()
