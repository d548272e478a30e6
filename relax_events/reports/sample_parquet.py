"""Writes rows of samples as Parquet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from relax_events.data.parquet import pa, parquet

ROWS_AT_ONCE = 256
PART = pa.struct([("type", pa.string()), ("text", pa.string()), ("path", pa.string())])
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.list_(PART))])
COLUMNS = {
    "sample_id": pa.string(),
    "prompt_group_id": pa.string(),
    "sample_index": pa.int64(),
    "policy_version": pa.int64(),
    "min_policy_version": pa.int64(),
    "max_policy_version": pa.int64(),
    "staleness": pa.int64(),
    "outcome": pa.string(),
    "issued_for_step": pa.int64(),
    "train_step": pa.int64(),
    "row": pa.int64(),
    "reward": pa.float64(),
    "reward_components": pa.map_(pa.string(), pa.float64()),
    "turn_rewards": pa.list_(pa.float64()),
    "reward_name": pa.string(),
    "reward_digest": pa.string(),
    "judge_response": pa.string(),
    "reward_error": pa.string(),
    "prompt": pa.string(),
    "messages": pa.list_(MESSAGE),
    "turns": pa.list_(MESSAGE),
    "completion": pa.string(),
    "answer": pa.string(),
    "metadata": pa.string(),
    "temperature": pa.float64(),
    "num_prompt_tokens": pa.int64(),
    "num_completion_tokens": pa.int64(),
    "finish_reason": pa.string(),
    "worker_id": pa.string(),
    "rolled_out_at": pa.timestamp("us", tz="UTC"),
    "position": pa.string(),
}
TOKEN_COLUMNS = {
    "tokens": pa.list_(pa.int64()),
    "loss_mask": pa.list_(pa.uint8()),
    "rollout_logprobs": pa.list_(pa.float32()),
    "path_lengths": pa.list_(pa.int64()),
}


class ParquetWriter:
    """A `RowWriter` whose memory is that of one row group."""

    def __init__(self, path: Path, *, tokens: bool) -> None:
        self._path, self._part = path, path.with_name(f".{path.name}.{os.getpid()}.part")
        self._schema = pa.schema(list((COLUMNS | (TOKEN_COLUMNS if tokens else {})).items()))
        self._writer = parquet.ParquetWriter(self._part, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        """Add a row."""
        self._rows.append(row | {"reward_components": list(row["reward_components"].items())})
        if len(self._rows) == ROWS_AT_ONCE:
            self._write_rows()

    def close(self, *, is_whole: bool) -> None:
        """End the file; one that is not whole is removed."""
        if is_whole:
            self._write_rows()
        self._writer.close()
        if is_whole:
            self._part.replace(self._path)
        else:
            self._part.unlink()

    def _write_rows(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._writer.write_table(pa.Table.from_pylist(rows, schema=self._schema))
