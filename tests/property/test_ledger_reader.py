"""The block-wise ledger reader agrees with one that reads everything, for any block size, over the
log of the real work loops.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_kafka import MemoryAdmin
from test_worker_machine import WorkerMachine

from relax_events.history import ledger as reading
from relax_events.history import run_log
from relax_events.history.ledger import LedgerReader
from relax_events.history.run_log import RunLog


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_ledger_is_the_same_for_any_block_size(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLOCK_RECORDS", "CHUNK_RECORDS", "LARGE_CHUNK_RECORDS"):
        monkeypatch.setattr(reading, name, size)
    machine = WorkerMachine()
    machine.start_run()
    try:
        machine.everyone_works(3, num_rolled_out=4)
        machine._finish()
        run = machine.run
        run.update_ledger()
        config = run.config.model_copy(
            update={"objects": run.config.objects.model_copy(update={"uri": tmp_path.as_uri()})}
        )
        admin = MemoryAdmin(run.kafka)
        monkeypatch.setattr(run_log, "open_admin", lambda *_, **__: admin)
        monkeypatch.setattr(run_log, "require_run", lambda *_: None)  # it publishes no schemas
        with RunLog(config, name="ledger", with_versions=False) as log:
            ledger = LedgerReader(log).read()
        assert ledger.problems() == run.ledger.problems() == []
        assert ledger.unverified() == []
        assert ledger.totals() == run.ledger.totals()
    finally:
        machine.teardown()
