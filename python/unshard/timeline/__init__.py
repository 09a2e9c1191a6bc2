"""What each rank did when: the engine writes `timeline.rank<N>.json` into a folder (`"unshard": {"timeline": "DIR"}`,
`unshard run --timeline DIR`); here they become one trace, with clocks corrected, and one page.

Python's side only: needs neither torch nor the engine, so that it runs where the files were copied to."""
from unshard.timeline.command import main
from unshard.timeline.merge import write_outputs

__all__ = ["main", "write_outputs"]
