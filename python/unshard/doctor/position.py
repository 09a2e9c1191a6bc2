"""The line of the user's program where a rank was."""
import re
import sys

_OURS = ("unshard", "deepspeed", "torch")
_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


def frames(record):
    """[{file, line, function, code, module}], innermost last."""
    position = record["position"]
    if not isinstance(position, dict):
        return []
    if isinstance(position.get("frames"), list):
        return [frame for frame in position["frames"] if isinstance(frame, dict) and isinstance(frame.get("file"), str)]
    return frames_of_text(position.get("text", ""))


def frames_of_text(text):
    """Of the main thread, which faulthandler shows last, innermost line first."""
    last = re.split(r"^(?:Current thread|Thread) ", str(text), flags=re.MULTILINE)[-1]
    found = [match for line in last.splitlines() if (match := _LINE.match(line))]
    return [{"file": m["file"], "line": int(m["line"]) if m["line"].isdigit() else 0, "function": m["function"], "code": "",
             "module": ""} for m in reversed(found)]


def users_line(record):
    """The innermost frame of the user's own files, else of any library but ours, torch's and Python's; None without one."""
    candidates = [frame for frame in frames(record) if not is_library(frame)]
    own = [frame for frame in candidates if not re.search(r"[/\\](site|dist)-packages[/\\]", frame["file"])]
    return (own or candidates or [None])[-1]


def is_library(frame):
    module = str(frame.get("module") or "").split(".")[0]
    if module:
        return module in _OURS or (module in sys.stdlib_module_names and module != "__main__")
    path = frame["file"]
    if path.startswith("<"):
        return True
    if re.search(r"[/\\](site|dist)-packages[/\\](unshard|deepspeed|torch)[/\\]", path):
        return True
    return bool(re.search(r"[/\\]python3[^/\\]*[/\\](?!site-packages|dist-packages)", path)) or "/python/unshard/" in path


def text(frame):
    code = f": {frame['code']}" if frame.get("code") else ""
    return f"{frame['file']}:{frame.get('line', 0)} in {frame.get('function', '?')}{code}"
