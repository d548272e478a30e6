"""Writes rows of samples as Parquet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from relax_events.data.parquet import pa, parquet
from relax_events.errors import ConfigError

ROWS_AT_ONCE = 256
PART = pa.struct([("type", pa.string()), ("text", pa.string()), ("path", pa.string())])
FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", FUNCTION)])
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.list_(PART)),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.list_(CALL)),
        ("name", pa.string()),
        ("tool_call_id", pa.string()),
    ]
)
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


def write_parquet(rows: Iterable[dict[str, Any]], *, path: Path | None, tokens: bool) -> None:
    """Write rows as Parquet; memory is that of one row group.

    Raises:
        ConfigError: There is no path.
    """
    if path is None:
        raise ConfigError("exporter 'parquet' writes a file; give --output-file")
    schema = pa.schema(list((COLUMNS | (TOKEN_COLUMNS if tokens else {})).items()))
    remaining = iter(rows)
    with parquet.ParquetWriter(path, schema, compression="zstd") as file:
        while batch := [_list_components(row) for row in islice(remaining, ROWS_AT_ONCE)]:
            file.write_table(pa.Table.from_pylist(batch, schema=schema))


def _list_components(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose map is a list of pairs, as pyarrow takes it."""
    return row | {"reward_components": list(row["reward_components"].items())}
