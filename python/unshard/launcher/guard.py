"""Two processes where one would do, so that a SIGKILL for either leaves nothing behind.

The inner one does the work and has the ranks as children. The outer one waits: when the inner one is gone, whatever it left, down to what
the ranks had started, falls to the outer one as their subreaper, and is ended. When the outer one is gone, the inner one gets SIGTERM.
"""
import os
import signal
import sys

from unshard.launcher import orphans
from unshard.launcher.signals import ENDING, terminate_with_parent
from unshard.streams import complete, discard

SI_KERNEL = 0x80         # si_code of signals that the terminal sends, to both processes


def guarded(work):
    """work()'s exit code, from a child process. Call it before there are threads."""
    complete()
    outer, before = os.getpid(), orphans.adopt()
    discard()                                    # flushed, or no business of the child's
    inner = os.fork()
    if inner == 0:
        code = 1
        try:
            terminate_with_parent()
            if os.getppid() == outer:            # else it died before the line above
                code = work()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            discard()
            os._exit(code)
    code = wait_for(inner)
    orphans.end_all_but(before)
    return code


def wait_for(inner):
    """The child's exit code; signals for this process go on to the child."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
    try:
        while True:
            pid, status = os.waitpid(inner, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            received = signal.sigtimedwait({*ENDING, signal.SIGCHLD}, 1.0)
            if received and received.si_signo != signal.SIGCHLD and received.si_code != SI_KERNEL:
                os.kill(inner, received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING, signal.SIGCHLD})
