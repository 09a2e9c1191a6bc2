"""The wire between the launcher and a host: frames in a stream of bytes in which other things may come too (a login shell's greeting)."""
import json

MAGIC = b"\x02unshard "


def pack(kind, payload=b"", **fields):
    head = json.dumps({**fields, "kind": kind, "size": len(payload)})
    return MAGIC + head.encode() + b"\n" + payload


class Unpacker:
    def __init__(self):
        self._data = b""

    def feed(self, data):
        """What these bytes complete, in order: (fields, payload) of a frame, (None, bytes) of anything else."""
        self._data += data
        found = []
        while self._data:
            at = self._data.find(MAGIC)
            if at == 0:
                frame = self._take_frame()
                if frame is None:
                    break
                found.append(frame)
                continue
            noise = at if at > 0 else len(self._data) - _beginning_of_magic(self._data)
            if noise == 0:
                break
            found.append((None, self._data[:noise]))
            self._data = self._data[noise:]
        return found

    def rest(self):
        """What came after the last whole thing, when no more will."""
        rest, self._data = self._data, b""
        return rest

    def _take_frame(self):
        newline = self._data.find(b"\n")
        if newline < 0:
            return None
        fields = json.loads(self._data[len(MAGIC):newline])
        if type(fields["kind"]) is not str or fields["size"] < 0:
            raise ValueError("no frame of the launcher")
        end = newline + 1 + fields["size"]
        if len(self._data) < end:
            return None
        payload, self._data = self._data[newline + 1:end], self._data[end:]
        return fields, payload


def _beginning_of_magic(data):
    """How many bytes at the end of `data` may be the beginning of a frame."""
    return next((n for n in range(min(len(data), len(MAGIC) - 1), 0, -1) if MAGIC.startswith(data[-n:])), 0)
