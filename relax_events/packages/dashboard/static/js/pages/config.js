// The run's configuration from its log, and what differs from another run.

import { of } from "../api.js";
import { h } from "../dom.js";
import { address, go } from "../state.js";
import { table } from "../table.js";
import { t } from "../strings.js";

function flat(tree, prefix = "", into = {}) {
  for (const [name, value] of Object.entries(tree)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) flat(value, `${prefix}${name}.`, into);
    else into[`${prefix}${name}`] = JSON.stringify(value);
  }
  return into;
}

export async function draw({ run, query, runs }) {
  const found = await of(run, "config", { other: query.other });
  const mine = flat(found.config);
  const theirs = flat(found.other);
  const wanted = (query.search || "").toLowerCase();
  const names = [...new Set([...Object.keys(mine), ...(query.other ? Object.keys(theirs) : [])])]
    .sort()
    .filter((name) => !wanted || name.toLowerCase().includes(wanted))
    .filter((name) => !(query.other && query.different) || mine[name] !== theirs[name]);
  const columns = [
    { label: t("key"), cell: (name) => name },
    { label: t("value"), text: true, cell: (name) => mine[name] ?? "–" },
  ];
  if (query.other) columns.push({ label: t("value_other", { run: query.other }), text: true, cell: (name) => theirs[name] ?? "–" });
  return [
    h(
      "form",
      { class: "filters", onsubmit: (event) => { event.preventDefault(); go({ search: event.target.elements.search.value }, { keep: true }); } },
      h("label", {}, t("other_run"), h("select", { "data-focus": "other", onchange: (event) => go({ other: event.target.value, different: event.target.value && "1" }, { keep: true }) }, h("option", { value: "" }, t("none")), runs.filter((one) => one.run_id !== run).map((one) => h("option", { value: one.run_id, selected: one.run_id === query.other }, one.run_id)))),
      h("label", {}, t("search"), h("input", { name: "search", value: query.search || "", "data-focus": "search" })),
      h("button", { type: "submit" }, t("apply")),
      query.other && h("a", { href: address({ different: query.different ? "" : "1" }, { keep: true }), "data-stay": "1" }, query.different ? t("all") : t("only_different")),
    ),
    table({ label: t("config"), columns, rows: names, chosen: (name) => query.other && mine[name] !== theirs[name] }),
  ];
}

export function isStill() {
  return true;
}
