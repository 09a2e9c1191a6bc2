"""Pickles read as data. Nothing is imported and nothing of the file is called: the few classes that checkpoints are made of are built here,
by name, from their arguments; any other becomes an inert `Foreign`.

This is an interpreter of the pickle language of its own, and not a `pickle.Unpickler` with a list of allowed names: what a stream can reach
is what stands in this file.
"""
import collections
import pickletools

from unshard.checkpoint.pickle_classes import CONSTRUCTORS, VALUES, Built, Foreign, Name
from unshard.core import CheckpointError

_MARK = object()
_MOST_MEMO = 1 << 26


def load(stream, place, persistent=None):
    """The value of the pickle that the binary file `stream` stands at. `persistent(id)` makes what lies outside of it (torch's storages).
    CheckpointError, which names `place`, for whatever is wrong with it."""
    try:
        return _Machine(place, persistent).run(stream)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"[checkpoint] {place}: nested too deeply") from None
    except MemoryError:
        raise CheckpointError(f"[checkpoint] {place}: asks for more memory than there is; damaged?") from None
    except Exception as error:               # pickletools raises ValueError and others for a damaged stream; so do operations on its values
        raise CheckpointError(f"[checkpoint] {place}: not a pickle that can be read ({type(error).__name__}: {error})") from error


class _Machine:
    def __init__(self, place, persistent):
        self.place = place
        self.persistent = persistent
        self.stack = []
        self.memo = {}

    def run(self, stream):
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                return self.finished()
            step = _STEPS.get(opcode.name)
            if step is None:
                raise CheckpointError(f"[checkpoint] {self.place}: pickle instruction {opcode.name} isn't one of checkpoints and isn't run")
            step(self, argument)
        raise CheckpointError(f"[checkpoint] {self.place}: ends in the middle")

    def finished(self):
        if len(self.stack) != 1:
            raise CheckpointError(f"[checkpoint] {self.place}: {len(self.stack)} values at the end of the pickle")
        return unwrapped(self.stack[0])

    def push(self, value):
        self.stack.append(value)

    def pop(self):
        value = self.stack.pop()
        if value is _MARK:
            raise CheckpointError(f"[checkpoint] {self.place}: a mark where a value should be")
        return value

    def top(self, kind):
        value = self.stack[-1]
        if isinstance(value, Built):
            value = value.value
        if not isinstance(value, kind):
            raise CheckpointError(f"[checkpoint] {self.place}: adds items to a {type(value).__name__}")
        return value

    def items(self):
        """What lies above the last mark."""
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                found = self.stack[i + 1:]
                del self.stack[i:]
                return [unwrapped(item) for item in found]
        raise CheckpointError(f"[checkpoint] {self.place}: no mark")

    def plain(self):
        return unwrapped(self.pop())

    def put(self, index):
        if len(self.memo) > _MOST_MEMO:
            raise CheckpointError(f"[checkpoint] {self.place}: remembers too much")
        if self.stack[-1] is _MARK:
            raise CheckpointError(f"[checkpoint] {self.place}: remembers a mark")
        self.memo[int(index)] = self.stack[-1]

    def memoize(self, _):
        self.put(len(self.memo))

    def get(self, index):
        self.push(self.memo[int(index)])

    def global_(self, argument):
        module, _, name = argument.partition(" ")
        self.name(module, name)

    def stack_global(self, _):
        name, module = self.pop(), self.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise CheckpointError(f"[checkpoint] {self.place}: a class whose name isn't text")
        self.name(module, name)

    def name(self, module, name):
        found = Name(module, name)
        self.push(VALUES[found] if found in VALUES else found)

    def reduce(self, _):
        arguments, what = self.plain(), self.pop()
        self.push(self.make(what, arguments))

    def new_object(self, _):
        arguments, what = self.plain(), self.pop()
        self.push(self.make(what, arguments))

    def new_object_ex(self, _):
        keywords, arguments, what = self.plain(), self.plain(), self.pop()
        if keywords:
            self.push(Foreign(what if isinstance(what, Name) else Name("?", "?"), (arguments, keywords)))
        else:
            self.push(self.make(what, arguments))

    def make(self, what, arguments):
        if isinstance(what, Foreign):
            return Foreign(what.name, (arguments,))
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise CheckpointError(f"[checkpoint] {self.place}: calls something that isn't a class")
        make = CONSTRUCTORS.get(what)
        return Foreign(what, arguments) if make is None else make(*arguments)

    def build(self, _):
        state, target = self.plain(), self.stack[-1]
        if isinstance(target, Built | Foreign):
            target.build(state)
        # Attributes that were hung on a plain value (torch.save of an OrderedDict with _metadata) are left out.

    def set_item(self, _):
        value, key = self.plain(), self.plain()
        self.top(dict | Foreign)[key] = value

    def set_items(self, _):
        items = self.items()
        target = self.top(dict | Foreign)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def append(self, _):
        value = self.plain()
        self.top(list | collections.deque | Foreign).append(value)

    def append_many(self, _):
        items = self.items()
        self.top(list | collections.deque | Foreign).extend(items)

    def add_items(self, _):
        items = self.items()
        self.top(set).update(items)

    def dict_of_items(self, _):
        items = self.items()
        self.push(dict(zip(items[::2], items[1::2], strict=True)))

    def persistent_id(self, _):
        id = self.plain()
        if self.persistent is None:
            raise CheckpointError(f"[checkpoint] {self.place}: refers to storage that this kind of file doesn't have")
        self.push(self.persistent(id))

    def tuple_of(self, count):
        items = [self.plain() for _ in range(count)]
        self.push(tuple(reversed(items)))


def unwrapped(value):
    """The value itself of what is still open to BUILD."""
    return value.finished() if isinstance(value, Built) else value


def _push_argument(machine, argument):
    machine.push(argument)


def _constant(make):
    return lambda machine, _: machine.push(make())


_STEPS = {
    "PROTO": lambda m, a: None, "FRAME": lambda m, a: None,
    "MARK": lambda m, a: m.stack.append(_MARK), "POP": lambda m, a: m.stack.pop(), "POP_MARK": lambda m, a: m.items(),
    "DUP": lambda m, a: m.push(m.stack[-1]),
    "NONE": _constant(lambda: None), "NEWTRUE": _constant(lambda: True), "NEWFALSE": _constant(lambda: False),
    "EMPTY_LIST": _constant(list), "EMPTY_DICT": _constant(dict), "EMPTY_TUPLE": _constant(tuple), "EMPTY_SET": _constant(set),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
                     "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
                     "BINBYTES8", "BYTEARRAY8"), _push_argument),
    "LIST": lambda m, a: m.push(m.items()), "TUPLE": lambda m, a: m.push(tuple(m.items())), "DICT": _Machine.dict_of_items,
    "FROZENSET": lambda m, a: m.push(frozenset(m.items())),
    "TUPLE1": lambda m, a: m.tuple_of(1), "TUPLE2": lambda m, a: m.tuple_of(2), "TUPLE3": lambda m, a: m.tuple_of(3),
    "APPEND": _Machine.append, "APPENDS": _Machine.append_many, "ADDITEMS": _Machine.add_items,
    "SETITEM": _Machine.set_item, "SETITEMS": _Machine.set_items,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put), "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": _Machine.global_, "STACK_GLOBAL": _Machine.stack_global, "REDUCE": _Machine.reduce, "NEWOBJ": _Machine.new_object,
    "NEWOBJ_EX": _Machine.new_object_ex, "BUILD": _Machine.build, "BINPERSID": _Machine.persistent_id,
}
