// How far each role is behind, by slot, and the age of the oldest unread record.

import { of } from "../api.js";
import { duration, number } from "../format.js";
import { table } from "../table.js";
import { t } from "../strings.js";

export async function draw({ run }) {
  const { rows } = await of(run, "lag");
  const columns = [
    { label: t("role"), cell: (row) => row.role },
    { label: t("slot"), cell: (row) => (row.slot === null ? t("queue") : number(row.slot)) },
    { label: t("version"), number: true, cell: (row) => number(row.policy_version) },
    { label: t("records_behind"), number: true, cell: (row) => number(row.num_records) },
    { label: t("stale_records"), number: true, cell: (row) => number(row.num_stale) },
    { label: t("oldest_unread"), number: true, cell: (row) => (row.age_seconds === null ? "–" : duration(row.age_seconds)) },
  ];
  return [table({ label: t("lag"), columns, rows })];
}
