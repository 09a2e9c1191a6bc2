"""The switch of hosts.py where links have a delay: gives each namespace a TAP device and passes frames on when their time has come.

    relay.py DEVICE DELAY_MS PID...         one namespace a PID; prints "up" when all devices are there

Bare interpreter, standard library. Frames are up to 64 KiB (the device's MTU), so 1 Gbit/s is 2,000 frames a second.
"""
import collections
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
FRAME_BYTES = 1 << 17


def open_tap(device, pid):
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns failed")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def relay(taps, delay):
    owners = {}                              # hardware address -> the TAP behind which it was last seen
    waiting = collections.deque()            # (when due, frame, to which TAPs); one delay for all, so in order
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for tap in select.select(taps, [], [], timeout)[0]:
            for _ in range(16):
                try:
                    frame = os.read(tap, FRAME_BYTES)
                except BlockingIOError:
                    break
                owners[frame[6:12]] = tap
                known = owners.get(frame[:6])
                waiting.append((time.monotonic() + delay, frame, [known] if known else [other for other in taps if other != tap]))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, frame, receivers = waiting.popleft()
            for tap in receivers:
                try:
                    os.write(tap, frame)
                except (BlockingIOError, OSError):
                    pass                     # its queue is full, or it isn't up yet: a switch drops the frame too


def main():
    device, delay_ms, pids = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    taps = [open_tap(device, pid) for pid in pids]
    print("up", flush=True)
    relay(taps, delay_ms / 1000)


if __name__ == "__main__":
    main()
