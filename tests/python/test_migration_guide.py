"""docs/from-deepspeed.md: its table of the JSON's keys is made of docs/config.md, which a C++ test holds against the schema."""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import key_table  # noqa: E402


def test_the_table_of_keys_is_current():
    assert key_table.main(["--check"]) == 0


def test_the_table_follows_a_change_of_a_keys_state():
    text = (ROOT / "docs" / "config.md").read_text()
    row = "| `overlap_comm` | true or false |"
    line = next(line for line in text.splitlines() if line.startswith(row))
    assert "| built |" in line
    now, then = (key_table.table(key_table.sections(t)) for t in (text, text.replace(line, line.replace("| built |", "| removed |"))))
    before, after = (next(row for row in table.splitlines() if row.startswith("| zero_optimization |")) for table in (now, then))
    assert "`overlap_comm`" in before.split("|")[2] and "`overlap_comm`" not in after.split("|")[2]
    assert "`overlap_comm`" in after.split("|")[5]


def test_the_guide_lists_every_key_of_the_configuration():
    guide, config = (ROOT / "docs" / "from-deepspeed.md").read_text(), (ROOT / "docs" / "config.md").read_text()
    keys = [line.split("|")[1].strip() for line in config.splitlines() if line.startswith("| `") and "| see below |" not in line]
    assert len(keys) > 300 and all(key in guide for key in keys)
