"""From a rank's clock to rank 0's."""
import bisect

# Quartz clocks drift by less than 100 parts in a million; what seems more is the error of a reading.
_MOST_DRIFT = 1e-3


class Clock:
    """`readings`: [(own time, offset to rank 0, uncertainty)] in nanoseconds. Linear between readings, constant before and after."""

    def __init__(self, readings):
        self.readings = _plausible(sorted(map(tuple, readings)))
        self._times = [reading[0] for reading in self.readings]
        self.uncertainty_ns = max((reading[2] for reading in self.readings), default=0)

    def offset(self, own_ns):
        if not self.readings:
            return 0
        after = bisect.bisect(self._times, own_ns)
        if after == 0 or after == len(self._times):
            return self.readings[min(after, len(self._times) - 1)][1]
        (t0, offset0, _), (t1, offset1, _) = self.readings[after - 1:after + 1]
        return offset0 + (offset1 - offset0) * (own_ns - t0) / (t1 - t0)

    def corrected(self, own_ns):
        return own_ns + self.offset(own_ns)


def _plausible(readings):
    """Without those that would make the clock drift as clocks don't: of two neighbours the less certain one goes. So times keep their
    order."""
    kept = []
    for reading in readings:
        kept.append(reading)
        while len(kept) > 1 and abs(kept[-1][1] - kept[-2][1]) > _MOST_DRIFT * (kept[-1][0] - kept[-2][0]):
            kept.pop(-2 if kept[-2][2] > kept[-1][2] else -1)
    return kept
