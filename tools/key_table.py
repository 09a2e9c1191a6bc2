"""Write the table of the JSON's keys into docs/from-deepspeed.md, from docs/config.md, which is made from the schema.

    python tools/key_table.py [--check]

`--check` changes nothing and fails where the table isn't current.
"""
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
STATES = ("built", "accepted, no effect", "not built yet", "removed")


def sections(text):
    """[(section's name, {state: [key]})] of docs/config.md."""
    found = []
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        name, _, body = part.partition("\n")
        keys = {state: [] for state in STATES}
        for line in body.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 5 and cells[3] in keys:
                keys[cells[3]].append(cells[0])
            elif len(cells) == 5 and cells[0].startswith("`") and cells[3] != "see below":
                raise ValueError(f"docs/config.md, {name}: the state '{cells[3]}' of {cells[0]} isn't one of {', '.join(STATES)}")
        found.append((name.replace(" of type ", ", "), keys))
    return found


def table(found):
    lines = [f"| section | {' | '.join(STATES)} |", "| --- |" + " --- |" * len(STATES)]
    lines += [f"| {name} | {' | '.join(', '.join(keys[state]) for state in STATES)} |" for name, keys in found if any(keys.values())]
    return "\n".join(lines) + "\n"


def main(arguments):
    page = DOCS / "from-deepspeed.md"
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + table(sections((DOCS / "config.md").read_text())) + END + after
    if wanted == text:
        return 0
    if "--check" in arguments:
        print(f"{page} is out of date: python tools/key_table.py", file=sys.stderr)
        return 1
    page.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
