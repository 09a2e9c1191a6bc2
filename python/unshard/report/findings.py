"""What is wrong: rules over the facts, each with a cure. A rule says nothing where nothing is wrong."""
import dataclasses

from unshard.report import rules_network, rules_process

LEVELS = {"problem": "wrong", "hosts": "wrong as soon as several hosts take part", "note": "to know"}


@dataclasses.dataclass(frozen=True)
class Finding:
    name: str         # stable, for programs
    level: str        # of LEVELS
    what: str
    cure: str


def findings(facts):
    """Problems first."""
    found = [Finding(*one) for rule in rules_process.RULES + rules_network.RULES for one in rule(facts)]
    return sorted(found, key=lambda one: list(LEVELS).index(one.level))
