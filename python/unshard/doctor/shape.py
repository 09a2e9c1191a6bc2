"""What a record must look like before anything is made of it."""
import math

_MOST_RANKS = 1 << 20
_MOST = 2.0**63


def _text(value):
    return isinstance(value, str)


def _number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_MOST < value < _MOST and math.isfinite(value)


def _whole(value):
    return isinstance(value, int) and _number(value)


def _ranks(value):
    return _whole(value) and 0 < value <= _MOST_RANKS


def _truth(value):
    return isinstance(value, bool)


def _any(value):
    return True


class _OrNull:
    def __init__(self, shape):
        self.shape = shape


# A dict has these keys (one with "?" may be missing), a list items of one shape; {str: shape} is a table with any keys.
_ENTRY = {"index": _whole, "op": _text, "detail": _text, "bytes": _whole, "step": _whole, "start": _number, "end?": _OrNull(_number)}
_GROUP = {"name": _text, "ranks": [_whole], "entries": [_ENTRY], "transport?": _text, "step?": _whole, "closed?": _truth,
          "phase?": _OrNull({"name": _text, "detail?": _text, "for_s?": _number}),
          "waiting?": _OrNull({"where": _text, "for_s": _number}), "peers?": _text, "counts?": {str: _any}, "hosts?": [_any]}
_LINK = {"peer?": _text, "bytes_sent?": _number, "round_trip_s?": _number, "send_bytes_per_s?": _number,
         "retransmitted_segments?": _number}
_RECORD = {"rank": _whole, "world_size": _ranks, "host": _text, "pid": _whole, "written": _number, "monotonic": _number,
           "groups": [_GROUP], "run?": _text, "reason?": _text, "text?": _text, "started?": _number, "versions?": {str: _text},
           "failure?": _OrNull({"kind": _text, "text": _text, "at?": _number}), "addresses?": [_text], "links?": [_LINK],
           "position?": _OrNull({"frames?": [_any], "text?": _text})}


def check_record(record):
    """Where it isn't what it should be; "" where it is."""
    wrong = _misfit(record, _RECORD, "")
    if wrong:
        return wrong
    world = record["world_size"]
    if not 0 <= record["rank"] < world:
        return f"rank {record['rank']} of {world}"
    if any(not 0 <= rank < world for group in record["groups"] for rank in group["ranks"]):
        return f"a group has a rank that isn't one of {world}"
    return ""


def _misfit(value, shape, where):
    if isinstance(shape, _OrNull):
        return "" if value is None else _misfit(value, shape.shape, where)
    if isinstance(shape, list):
        items = enumerate(value) if isinstance(value, list) else None
        parts = None if items is None else ((item, shape[0], f"{where}[{index}]") for index, item in items)
    elif isinstance(shape, dict):
        parts = _parts(value, shape, f"{where}." if where else "") if isinstance(value, dict) else None
    else:
        parts = () if shape(value) else None
    if parts is None:
        return f"'{where}' is missing or not what it should be"
    return next((wrong for part in parts if (wrong := _misfit(*part))), "")


def _parts(table, shape, where):
    if str in shape:
        return [(value, shape[str], where + key) for key, value in table.items()]
    names = {key.removesuffix("?"): key for key in shape}
    return [(table.get(name), shape[key], where + name) for name, key in names.items() if name in table or key == name]
