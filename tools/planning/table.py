"""``predict``: a CSV of runs, with what the planner makes of them."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

from megalite.errors import ConfigError
from megalite.planner.rows import is_known_gpu, predict

ADDED = ("pred_iter_time_s", "pred_mem_gb", "pred_note")
_MOST_SAID = 8


def predict_file(source: Path, target: Path) -> int:
    """Adds the predictions to every row; the number of rows.

    Raises:
        ConfigError: if the file cannot be read, or has no columns of a model.
    """
    try:
        text = source.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError("--csv", f"{source} cannot be read: {reason}", "Name a CSV") from error
    reader = csv.DictReader(text.splitlines(keepends=True))
    columns = list(reader.fieldnames or ())
    if not {"layers", "hidden", "params_b"} & set(columns):
        raise ConfigError(
            "--csv",
            f"{source} has none of the columns layers, hidden and params_b",
            "Commas between columns, named as in docs/planner.md",
        )
    rows = list(reader)
    strange = sorted({row.get("gpu") or "" for row in rows if not is_known_gpu(row)})
    if strange:
        print(f"plan.py: not known, taken for an A100: {', '.join(strange)}", file=sys.stderr)
    notes: Counter[str] = Counter()
    for row in rows:
        found = predict(row)
        row.update(pred_iter_time_s=f"{found.iter_time_s:.6g}", pred_mem_gb=f"{found.mem_gb:.4g}")
        row["pred_note"] = found.note
        notes[found.note] += bool(found.note)
    for note, times in [x for x in notes.most_common(_MOST_SAID) if x[1]]:
        print(f"plan.py: {times} row{'s' * (times > 1)}: {note}", file=sys.stderr)
    if len(+notes) > _MOST_SAID:
        print(f"plan.py: {len(+notes) - _MOST_SAID} more in pred_note", file=sys.stderr)
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file,
            [*(c for c in columns if c not in ADDED), *ADDED],
            extrasaction="ignore",
            lineterminator="\n",
        )
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)
