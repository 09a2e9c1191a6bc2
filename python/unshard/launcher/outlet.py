"""Where the launcher writes: its standard output and error. Whatever becomes of those, the ranks' pipes go on being read, for a rank
that has to wait there never ends."""
from unshard.launcher.watch import write_all
from unshard.streams import BROKEN_PIPE

NAMES = {1: "standard output", 2: "standard error"}


class Outlet:
    """What can't be written is dropped. A reader that has gone is an order to end the job, as SIGPIPE is to other programs; anything else
    (a full disk) is said once, and tried again with whatever comes next."""

    def __init__(self):
        self.reader_gone = False
        self.lost = 0                            # bytes, but for those that nobody wanted
        self._gone, self._told = set(), set()    # streams without a reader; streams whose error was said

    def write(self, stream, data):
        if stream in self._gone:
            return
        try:
            write_all(stream, data)
        except BrokenPipeError:
            self._gone.add(stream)
            self.reader_gone = True
        except OSError as error:
            self.lost += len(data)
            if stream not in self._told:
                self._told.add(stream)
                self.say(f"{NAMES[stream]} can't be written: {error.strerror}; the ranks go on, and what they say is lost while that is so")

    def say(self, text):
        """A line of the launcher's own."""
        try:
            write_all(2, f"[unshard run] {text}\n".encode(errors="backslashreplace"))
        except OSError:
            pass                                 # there is nobody else to tell

    def code(self):
        """The exit code of a job whose ranks all ended well."""
        if self.reader_gone:
            return BROKEN_PIPE
        if self.lost:
            self.say(f"all ranks ended well, but {self.lost} bytes of what they said couldn't be written: exit code 1")
        return 1 if self.lost else 0
