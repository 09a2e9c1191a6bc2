"""Records from files. Whatever is in a file, reading it ends in a record or in a line that says what is wrong with it."""
import dataclasses
import json
import os
import re

from unshard.doctor.shape import check_record

FORMAT = 1
_NAME = re.compile(r"rank(\d+)\.json")


@dataclasses.dataclass
class Records:
    by_rank: dict                 # rank -> record
    problems: list                # lines about what couldn't be read or doesn't fit
    world: int = 0                # ranks of the run; 0: no record says

    @property
    def missing(self):
        return [rank for rank in range(self.world) if rank not in self.by_rank]


def load_folders(folders):
    """Raises OSError for a folder that isn't there."""
    files = []
    for folder in folders:
        files += [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _NAME.fullmatch(name)]
    return load_files(files, [] if files else [f"there is no rank<N>.json in {', '.join(folders)}: ranks write one when something goes "
                                          "wrong, and at a good end only with `unshard run --record-at-end` (UNSHARD_RECORD_AT_END=1)"])


def load_files(files, notes=()):
    """The newest record of each rank."""
    records, problems = {}, list(notes)
    for path in files:
        record, problem = read_record(path)
        if problem:
            problems.append(problem)
        elif record["rank"] not in records or records[record["rank"]]["written"] < record["written"]:
            records[record["rank"]] = record
    return gather(records, problems)


def gather(by_rank, problems=()):
    """Records of one run: those of another are left out, and said."""
    problems = list(problems)
    if not by_rank:
        return Records({}, problems)
    newest = max(by_rank.values(), key=lambda record: record["written"])
    kept = {}
    for rank, record in sorted(by_rank.items()):
        if (record["run"], record["world_size"]) == (newest["run"], newest["world_size"]):
            kept[rank] = record
        else:
            problems.append(f"rank {rank}'s record is of another run ({record['world_size']} ranks, run id '{record['run']}'): left out")
    return Records(kept, problems, newest["world_size"])


def read_record(path):
    """(record, "") or (None, what is wrong)."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            record = json.load(file)
    except OSError as error:
        return None, f"{path} can't be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return None, f"{path} is damaged: it isn't JSON ({error})"
    wrong = check(record)
    return (None, f"{path} is damaged: {wrong}") if wrong else (complete(record), "")


def check(record):
    """What keeps this from being a record; "" when it is one."""
    if not isinstance(record, dict):
        return "it isn't a record"
    if record.get("format") != FORMAT:
        return f"format {str(record.get('format'))[:40]!r}; this version reads {FORMAT}"
    return check_record(record)


def complete(record):
    """With every optional part there."""
    for key, value in (("run", ""), ("reason", ""), ("text", ""), ("failure", None), ("versions", {}), ("position", None),
                       ("addresses", []), ("links", []), ("started", 0)):
        record.setdefault(key, value)
    for group in record["groups"]:
        for key, value in (("transport", ""), ("step", 0), ("closed", False), ("phase", None), ("waiting", None), ("peers", ""),
                           ("counts", {}), ("hosts", [])):
            group.setdefault(key, value)
        for entry in group["entries"]:
            entry.setdefault("end", None)
    return record
