// All runs of the cluster; some of them side by side.

import { get } from "../api.js";
import { h } from "../dom.js";
import { number, time } from "../format.js";
import { address } from "../state.js";
import { table } from "../table.js";
import { t } from "../strings.js";

export async function draw({ run, query }) {
  const { runs } = await get("runs");
  const columns = [
    { label: t("run"), cell: (row) => h("a", { href: address({ run: row.run_id }) }, row.run_id) },
    { label: t("status"), cell: (row) => t(`status_${row.status}`) },
    { label: t("step"), number: true, cell: (row) => number(row.step) },
    { label: t("reward"), number: true, cell: (row) => number(row.reward) },
    { label: t("started"), cell: (row) => time(row.started_at) },
    { label: t("from_run"), cell: (row) => row.source || "–" },
    { label: t("records"), number: true, cell: (row) => number(row.num_records) },
    {
      label: t("compare"),
      cell: (row) => {
        if (!run || row.run_id === run) return "–";
        const chosen = (query.compare || "").split(",").filter(Boolean);
        const next = chosen.includes(row.run_id) ? chosen : [...chosen, row.run_id].slice(-3);
        return h("a", { href: address({ page: "overview", compare: next.join(",") }) }, t("compare"), h("span", { class: "sr" }, ` ${row.run_id}`));
      },
    },
  ];
  return [table({ label: t("runs"), columns, rows: runs, chosen: (row) => row.run_id === run })];
}
