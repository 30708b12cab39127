"""``kvsan check CASE``: a saved case, run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..ci.cases import Case, case_allocator, load_case
from ..model.errors import without_byte_order_mark
from ..model.spec import MAX_SPEC_BYTES
from .examination import Examination


class SavedCase(msgspec.Struct, frozen=True):
    """A case, where it was read, and the allocator to run it with."""

    path: str
    case: Case
    allocator: str

    def outcome(self, examination: Examination) -> dict[str, Any]:
        """Return what became of the case: the rules it broke, those it breaks now, and whether any is still broken.

        A case that names no rule fails with any. Refusing a spec outside of what an allocator supports is no failure.
        """
        refusal = examination.rejection
        rightful = refusal is not None and not refusal.supported and refusal.rule == "rejected"
        return self.outcome_of([] if rightful else examination.rules)

    def outcome_of(self, now: list[str]) -> dict[str, Any]:
        """Return what became of the case, which breaks the rules ``now``."""
        found = [entry.rule for entry in self.case.found]
        still_fails = bool(set(found) & set(now)) if found else bool(now)
        return {"path": self.path, "rules": found, "rules_now": now, "still_fails": still_fails}


def read_saved_case(config: str, allocator: str | None) -> SavedCase | None:
    """Return the case in the file ``config``, None when it is no case; raise ``SpecError`` for a broken one."""
    path = Path(config)
    try:
        if not path.is_file() or path.stat().st_size > MAX_SPEC_BYTES:
            return None
        kind = msgspec.json.decode(without_byte_order_mark(path.read_bytes()), type=dict[str, Any]).get("kvsan")
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None  # the reader of models words these errors
    if kind != "case":
        return None
    case = load_case(path)
    return SavedCase(config, case, case_allocator(case, allocator))
