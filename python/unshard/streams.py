"""Standard input, output and error of the commands, which may be closed, full, or have no reader any more."""
import functools
import os
import signal
import sys

BROKEN_PIPE = 128 + signal.SIGPIPE       # as a shell tells of a program that wrote to a reader that had gone


def command(name):
    """Decorates main() of the command of that name: what it prints is written when it returns, or its exit code says that it wasn't.

    A reader that has gone (`| head -1`) ends it quietly, another error (a full disk) with one line."""
    def decorate(main):
        @functools.wraps(main)
        def careful(*arguments, **options):
            complete()
            try:
                try:
                    code = main(*arguments, **options)
                except SystemExit:               # argparse's: after --help, say
                    sys.stdout.flush()
                    raise
                sys.stdout.flush()
                return code
            except BrokenPipeError:
                discard()
                return BROKEN_PIPE
            except OSError as error:
                if error.filename is not None:   # of a file of the command's
                    raise
                complain(f"{name}: error: the output can't be written: {error.strerror}")
                discard()
                return 1
        return careful
    return decorate


def complete():
    """A standard descriptor that is closed becomes the null device: else the next file that is opened is taken for it."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))    # until the process ends


def discard():
    """What is still in the buffers can't be written: it mustn't fail a second time, when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def complain(line):
    """On standard error, if that can be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard()


def has_no_reader(fd):
    """The descriptor is a pipe or socket that nobody reads any more."""
    import select

    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
