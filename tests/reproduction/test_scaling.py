"""Weak and strong scaling: what grows with the replicas, and what the bubble and a memory too small make of it."""

from pathlib import Path

import pytest
from recipe_runs import column, experiment, real_runner

SMALL = (
    "recompute=always",
    "model=transformer_lm", "dataset=synthetic_text", "model.layers=2", "model.width=8", "model.hidden=8",
    "model.heads=1", "model.length=4", "dataset.vocabulary=8", "hardware=tpu_v3", "ema_decay=0",
)  # fmt: skip


def test_replicas_take_their_share_of_a_mini_batch(tmp_path: Path) -> None:
    cells = [("weak", 1, 1), ("weak", 2, 2), ("weak", 2, 8), ("weak", 2, 16), ("strong", 1, 1), ("strong", 2, 2)]
    rows = []
    for scaling, k, r in [*cells, ("strong", 2, 8)]:
        samples = 8 * r if scaling == "weak" else 16
        sizes = {"partitions": k, "replicas": r, "batch_size": samples, "micro_batches": samples // (2 * r)}
        rows.append({"scaling": scaling, **sizes})
    tiny = {"name": "tiny", "settings": SMALL, "rows": rows}
    found = experiment("scaling", models=[tiny])(real_runner("scaling", tmp_path))
    (table,) = found.tables
    assert column(table, "devices") == ["1", "4", "16", "32", "1", "4", "16"]
    assert column(table, "fits", "simulated") == ["yes"] * 7
    efficiencies, idle = (
        [float(cell.removesuffix(" %")) for cell in column(table, heading, "simulated")]
        for heading in ("efficiency", "idle")
    )
    assert efficiencies[0] == efficiencies[4] == 100.0
    assert efficiencies[4] > efficiencies[5] > efficiencies[6]
    assert idle[4] < idle[5] < idle[6]
    assert idle[1] == pytest.approx(idle[2], abs=2.0)  # but for the sum of gradients
    ((_, picture),) = found.files
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert any("strong: from 1 to 16 devices a replica's M goes from 8 to 1" in line for _, line in found.notes)
