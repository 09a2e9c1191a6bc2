"""How a process ended, asked through its pidfd, though another thread of this process may have reaped it."""
import errno
import fcntl
import os
import struct

# From Linux 6.15 on a pidfd tells the status of a process that has been reaped. struct pidfd_info, 64 bytes: a mask of what is asked for
# and told, fields that don't matter here, the status as wait() has it.
PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
PIDFD_INFO = struct.Struct("=Q52xi")


def exit_status(pidfd):
    """Exit code, -N for signal N; None where it can't be known any more."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is not None:
            return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
    except ChildProcessError:
        pass
    return status_after_reaping(pidfd)


def status_after_reaping(pidfd):
    try:
        mask, status = PIDFD_INFO.unpack(fcntl.ioctl(pidfd, PIDFD_GET_INFO, PIDFD_INFO.pack(PIDFD_INFO_EXIT, 0)))
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):
            raise
        return None
    return os.waitstatus_to_exitcode(status) if mask & PIDFD_INFO_EXIT else None
